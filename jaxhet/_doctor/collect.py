"""Facts of this machine for a report: GPUs, kernel, and all of them together."""

import os
import pathlib
import re

from jaxhet import _config, _ffi
from jaxhet._doctor import findings, nics, second_look, software
from jaxhet._doctor.files import names, number, read
from jaxhet._doctor.report import SCHEMA, Gpu, Host, Report, Vendor
from jaxhet._vendors import BY_NAME

_PCI = "sys/bus/pci/devices"
_PCI_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)  # VGA, 3D, other display; processing accelerator
ROOT = pathlib.Path("/")


def collect(root: pathlib.Path = ROOT) -> Report:
    """The report on this machine.

    Args:
      root: Folder with the machine's /sys, /proc and /dev.

    Raises:
      UsageError: an option in the environment is not valid.
    """
    second = second_look.look()
    programs = software.read_software(second.part)
    found = nics.read_nics(root, nics.ask_transport(_config.resolve()))
    vendors = read_vendors(root)
    kernel = read_host(root)
    problems = findings.find(programs, vendors, found, kernel, second)
    return Report(
        schema=SCHEMA,
        ok=all(finding.level != "error" for finding in problems),
        findings=problems,
        software=programs,
        vendors=vendors,
        nics=found,
        host=kernel,
    )


def read_vendors(root: pathlib.Path) -> tuple[Vendor, ...]:
    """All vendors, with or without GPUs here."""
    return tuple(
        Vendor(
            name=name,
            hardware=find_hardware(root, name),
            reason=reason,
            gpus=tuple(
                Gpu(
                    id=f"{name}:{info['ordinal']}",
                    name=info["name"],
                    pci=info["pci"].lower(),
                    driver=BY_NAME[name].driver_version(info["driver_version"]),
                    stream_values=info["stream_values"],
                    dma_buf=info["dma_buf"],
                    gpu_direct_rdma=info["gpu_direct_rdma"],
                )
                for info in devices
            ),
        )
        for name, devices, reason in _ffi.vendors()
    )


def find_hardware(root: pathlib.Path, vendor: str) -> tuple[str, ...]:
    """The PCI addresses of a vendor's GPUs."""
    return tuple(
        address
        for address in names(root, _PCI)
        if number(read(root, f"{_PCI}/{address}/vendor"), -1) == BY_NAME[vendor].pci_vendor
        and number(read(root, f"{_PCI}/{address}/class"), -1) >> 8 in _PCI_CLASSES
    )


def read_host(root: pathlib.Path) -> Host:
    """The kernel of the machine whose files are below `root`."""
    return Host(
        kernel=read(root, "proc/sys/kernel/osrelease"),
        memlock_bytes=_memlock(read(root, "proc/self/limits")),
        shm_bytes=_shm(root),
    )


def _memlock(limits: str) -> int | None:
    """Soft limit of locked memory, in bytes, from the process's table of limits."""
    match = re.search(r"^Max locked memory\s+(\d+)", limits, re.MULTILINE)
    return int(match[1]) if match else None


def _shm(root: pathlib.Path) -> int | None:
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
