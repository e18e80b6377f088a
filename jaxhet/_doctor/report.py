"""Findings of `jaxhet doctor`, and the description of the JSON of `jaxhet doctor --json`.

The JSON object is a `Report`: objects have the fields of the classes, arrays are tuples, null is
None. `SCHEMA` changes when a field is removed or gets another meaning, not when one is added.
"""

import dataclasses
from typing import Literal

SCHEMA = 6


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, and the next step.

    Attributes:
      level: "error": a necessary part does not work; "warning": jaxhet works, but not as
        fast, or not with all of the hardware.
      text: One or two sentences.
    """

    level: Literal["error", "warning"]
    text: str


@dataclasses.dataclass(frozen=True)
class Part:
    """An optional part.

    Attributes:
      usable: Whether it is installed and works.
      text: Version or place of the part; why it is off, if it is not usable.
    """

    usable: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed JAX plugin of a vendor.

    Attributes:
      name: Name of the package.
      version: Version of the package.
      vendor: Name of the vendor, see `Vendor`.
      problem: Why this JAX does not use it, or "".
    """

    name: str
    version: str
    vendor: str
    problem: str


@dataclasses.dataclass(frozen=True)
class Software:
    """Versions.

    Attributes:
      python: Version of Python.
      jaxhet: Version of jaxhet.
      jax: Version of jax.
      jaxlib: Version of jaxlib.
      hlo_hook: Whether jax lets jaxhet change programs; without it nothing can cross islands.
      plugins: The vendors' plugins that are installed.
      verbs: The library for RDMA, libibverbs.
      pyverbs: The Python bindings of libibverbs: a second look at NICs.
      libcrypto: The library that `JAXHET_ENCRYPTION` needs, OpenSSL's.
    """

    python: str
    jaxhet: str
    jax: str
    jaxlib: str
    hlo_hook: Part
    plugins: tuple[Plugin, ...]
    verbs: Part
    pyverbs: Part
    libcrypto: Part


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, as the vendor's driver describes it.

    Attributes:
      id: Vendor and the driver's number in this process, for example "cuda:0".
      name: Name of the product.
      pci: PCI address of the GPU.
      driver: The version of the driver's interface.
      stream_values: Whether streams can wait for values in memory.
      dma_buf: Whether memory can be exported as dma-buf, for a NIC.
      gpu_direct_rdma: Whether a NIC can register the GPU's memory, by any method.
    """

    id: str
    name: str
    pci: str
    driver: str
    stream_values: bool
    dma_buf: bool
    gpu_direct_rdma: bool


@dataclasses.dataclass(frozen=True)
class Vendor:
    """A vendor of GPUs.

    Attributes:
      name: "cuda" or "hip".
      hardware: PCI addresses of the vendor's GPUs that the kernel sees.
      reason: Why its GPUs can't be used here, or "".
      gpus: GPUs that this process can use.
    """

    name: str
    hardware: tuple[str, ...]
    reason: str
    gpus: tuple[Gpu, ...]


@dataclasses.dataclass(frozen=True)
class Gid:
    """An entry of a port's table of addresses; empty ones are left out.

    Attributes:
      index: Place in the table.
      address: An IPv6 address; `::ffff:10.0.0.1` stands for an IPv4 one.
      type: "IB/RoCE v1" or "RoCE v2".
      netdev: The network device that it belongs to; "" if that is in another namespace.
    """

    index: int
    address: str
    type: str
    netdev: str


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a NIC.

    Attributes:
      number: Number of the port, from 1 on.
      state: "ACTIVE" when it can be used.
      physical_state: For example "LinkUp".
      link_layer: "InfiniBand" or "Ethernet" (which is RoCE).
      rate: For example "400 Gb/sec (4X NDR)".
      active_mtu: MTU in bytes; None: not known without libibverbs.
      gids: Addresses of the port.
      gid_index: Index of the GID that a job uses; None: no GID, or not known without libibverbs.
      gid_reason: Why this GID, or why InfiniBand needs none; "" if there is no GID.
      problem: Why a job does not use the port, or "".
    """

    number: int
    state: str
    physical_state: str
    link_layer: str
    rate: str
    active_mtu: int | None
    gids: tuple[Gid, ...]
    gid_index: int | None
    gid_reason: str
    problem: str


@dataclasses.dataclass(frozen=True)
class Nic:
    """An RDMA NIC.

    Attributes:
      name: For example "mlx5_0".
      problem: Why this process can't use it, or "".
      ports: Ports of the NIC.
    """

    name: str
    problem: str
    ports: tuple[Port, ...]


@dataclasses.dataclass(frozen=True)
class Host:
    """The kernel and its limits.

    Attributes:
      kernel: Release of the kernel.
      memlock_bytes: Memory that this process may lock, which RDMA needs; None: any amount.
      shm_bytes: Size of /dev/shm, which NCCL and RCCL use inside an island; None: no such folder.
    """

    kernel: str
    memlock_bytes: int | None
    shm_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of `jaxhet doctor`.

    Attributes:
      schema: `SCHEMA`.
      ok: Whether no finding is an error.
      findings: Problems, errors first.
      software: Versions.
      vendors: Vendors of GPUs, in the order in which they are tried.
      nics: RDMA NICs, sorted by name.
      host: The kernel and its limits.
    """

    schema: int
    ok: bool
    findings: tuple[Finding, ...]
    software: Software
    vendors: tuple[Vendor, ...]
    nics: tuple[Nic, ...]
    host: Host
