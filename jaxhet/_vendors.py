"""The table of the vendors of GPUs. The C++ engine has one more, in xla_plugin/device/table.cc."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Vendor:
    """Facts about a vendor that no library provides.

    Attributes:
      platform: JAX's name of the platform. Packages of the plugin begin with `jax-<platform>`, and
        its modules with `jax_plugins.xla_<platform>`.
      name: Name of the vendor in xla_plugin/device/table.cc.
      visible: Environment variable that names the GPUs that a process sees.
      visible_below: Variable that selects the GPUs which `visible` numbers, or "".
      queues: Environment variable with the number of the driver's hardware queues.
      num_queues: Number of queues that a job of several islands sets.
      pci_vendor: Vendor in the PCI configuration of a GPU.
      jax_extra: Package that installs JAX with the plugin.
      driver_version: Formats the number of the driver's interface as a version.
      device_files: Beginning of the names in /dev of the GPUs, before a number; "": JAX counts
        them.
    """

    platform: str
    name: str
    visible: str
    queues: str
    num_queues: int
    pci_vendor: int
    jax_extra: str
    driver_version: Callable[[int], str] = str
    visible_below: str = ""
    device_files: str = ""


# The order is that in which JAX tries platforms.
VENDORS = (
    Vendor(
        platform="cuda",
        name="cuda",
        visible="CUDA_VISIBLE_DEVICES",
        queues="CUDA_DEVICE_MAX_CONNECTIONS",
        num_queues=32,  # the maximum; CUDA's default is 8
        pci_vendor=0x10DE,
        jax_extra="jax[cuda13]",
        device_files="nvidia",
        driver_version=lambda v: f"{v // 1000}.{v % 1000 // 10}",  # 1000 × major + 10 × minor
    ),
    Vendor(
        platform="rocm",
        name="hip",
        visible="HIP_VISIBLE_DEVICES",
        visible_below="ROCR_VISIBLE_DEVICES",
        queues="GPU_MAX_HW_QUEUES",
        num_queues=16,  # HIP's default is 4
        pci_vendor=0x1002,
        jax_extra="jax[rocm7-local]",
        driver_version=lambda v: f"{v // 10_000_000}.{v // 100_000 % 100}.{v % 100_000}",
    ),
)

BY_PLATFORM = {vendor.platform: vendor for vendor in VENDORS}
BY_NAME = {vendor.name: vendor for vendor in VENDORS}
