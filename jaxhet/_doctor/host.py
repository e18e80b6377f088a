"""The kernel: options and limits that transports and NCCL depend on."""

import gzip
import os
import pathlib
import re

from jaxhet._doctor.files import read
from jaxhet._doctor.report import Host

# Without these two, some kernels lose what a NIC writes into an AMD GPU's memory.
KERNEL_OPTIONS = ("CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA")


def read_host(root: pathlib.Path) -> Host:
    """The kernel of the machine whose files are below `root`."""
    kernel = read(root, "proc/sys/kernel/osrelease")
    return Host(
        kernel=kernel,
        kernel_options=_kernel_options(root, kernel),
        memlock_bytes=_memlock(read(root, "proc/self/limits")),
        shm_bytes=_shm(root),
    )


def _kernel_options(root: pathlib.Path, kernel: str) -> dict[str, str | None]:
    """The values of KERNEL_OPTIONS; None where no file lists the kernel's options."""
    text = read(root, f"boot/config-{kernel}")
    if not text:
        try:
            packed = (root / "proc/config.gz").read_bytes()
            text = gzip.decompress(packed).decode(errors="replace")
        except (OSError, EOFError):
            return dict.fromkeys(KERNEL_OPTIONS)
    found = dict(re.findall(r"^(CONFIG_\w+)=(\S+)", text, re.MULTILINE))
    return {name: found.get(name, "n") for name in KERNEL_OPTIONS}


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
