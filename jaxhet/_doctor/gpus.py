"""GPUs, by the engine's own device layer; and by sysfs, where no driver answers."""

import pathlib

from jaxhet import _ffi
from jaxhet._doctor.files import names, number, read
from jaxhet._doctor.report import Gpu, Vendor
from jaxhet._vendors import BY_NAME

_PCI = "sys/bus/pci/devices"
_PCI_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)  # VGA, 3D, other display; processing accelerator


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
                    uuid=info["uuid"],
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
