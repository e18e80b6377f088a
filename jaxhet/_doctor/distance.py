"""How far a GPU is from a NIC, by the places of both in the PCIe tree of sysfs."""

import pathlib
from collections.abc import Sequence

from jaxhet import _ffi
from jaxhet._doctor.report import Distance, Nic, Vendor


def read_distances(
    root: pathlib.Path, vendors: Sequence[Vendor], nics: Sequence[Nic]
) -> tuple[Distance, ...]:
    """Distance of each GPU to each NIC on the PCIe bus."""
    distances = []
    for gpu in (gpu for vendor in vendors for gpu in vendor.gpus):
        paths = {nic.name: _ffi.distance(root, gpu.pci, nic.pci) for nic in nics if nic.pci}
        nearest = min(paths.values(), key=_ffi.DISTANCES.index, default=None)
        for name, path in paths.items():
            distances.append(Distance(gpu.id, name, path, path == nearest))
    return tuple(distances)
