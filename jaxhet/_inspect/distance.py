"""How far a GPU is from a NIC, by the places of both in the PCIe tree of sysfs."""

import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Literal

from jaxhet._inspect.files import number, read
from jaxhet._inspect.report import Distance, Nic, Vendor

Level = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
_LEVELS: tuple[Level, ...] = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first


def read_distances(
    root: pathlib.Path, vendors: Sequence[Vendor], nics: Sequence[Nic]
) -> tuple[Distance, ...]:
    """Of each GPU to each NIC on the PCIe bus."""
    distances = []
    for gpu in (gpu for vendor in vendors for gpu in vendor.gpus):
        levels: dict[str, Level] = {
            nic.name: _level(root, gpu.pci, nic.pci) for nic in nics if nic.pci
        }
        nearest = min(levels.values(), key=_LEVELS.index, default=None)
        for name, level in levels.items():
            distances.append(Distance(gpu.id, name, level, level == nearest))
    return tuple(distances)


def _level(root: pathlib.Path, one: str, other: str) -> Level:
    paths = [_path(root, address) for address in (one, other)]
    pairs = zip(*paths, strict=False)
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if shared > 1:  # a bridge below the host bridge
        below = max(len(path) - shared for path in paths)
        return "PIX" if below <= 2 else "PXB"  # a switch has a port above the device
    if shared == 1:
        return "PHB"
    nodes = [
        number(read(root, f"sys/bus/pci/devices/{address}/numa_node"), -1)
        for address in (one, other)
    ]
    return "NODE" if nodes[0] == nodes[1] else "SYS"


def _path(root: pathlib.Path, address: str) -> list[str]:
    """From the host bridge to the device: ["pci0000:00", "0000:00:01.0", …]; [] if unknown."""
    link = root / "sys/bus/pci/devices" / address
    parts = pathlib.Path(os.path.realpath(link)).parts if link.exists() else ()
    return list(parts[next((i for i, p in enumerate(parts) if p.startswith("pci")), len(parts)) :])
