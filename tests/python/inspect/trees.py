"""Machines that are not here: their /sys, /proc and /dev as folders of files.

The contents are as kernels write them.
"""

import pathlib
from typing import Any

from jaxhet._doctor.nics import Choice

ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             95893                95893                processes
Max locked memory         {soft:<20} unlimited            bytes
"""


def chosen(nic: str, **changes: Any) -> Choice:
    """Report of the verbs transport on port 1 of `roce_host`'s NIC, or of one like it."""
    port = {"device": nic, "port": 1, "mtu": 4096, "gid_index": 5}
    port |= {"reason": "RoCE v2, IPv4, on ens1f0", "problem": ""}
    return Choice((port | changes,))


class Tree:
    """A root folder to fill."""

    def __init__(self, root: pathlib.Path):
        self.root = root

    def file(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        """A relative symbolic link, as sysfs has them."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        up = pathlib.Path(*[".."] * (len(pathlib.Path(path).parts) - 1))
        place.symlink_to(up / target)

    def pci(self, path: str, vendor: int, class_: int) -> str:
        """A device below /sys/devices, by its whole path; returns its address."""
        address = path.rpartition("/")[2]
        folder = f"sys/devices/{path}"
        self.file(f"{folder}/vendor", f"{vendor:#06x}")
        self.file(f"{folder}/class", f"{class_:#08x}")
        self.link(f"sys/bus/pci/devices/{address}", folder)
        return address

    def nic(self, name: str) -> None:
        """A NIC without ports, that programs can open."""
        self.file(f"sys/class/infiniband/{name}/node_type", "1: CA")
        self.file("sys/class/infiniband_verbs/uverbs0/ibdev", name)
        self.file("dev/infiniband/uverbs0", "")

    def port(self, nic: str, link_layer: str, state: str = "4: ACTIVE", up: bool = True) -> str:
        """Port 1 with an empty table of GIDs; returns its folder."""
        folder = f"sys/class/infiniband/{nic}/ports/1"
        self.file(f"{folder}/state", state)
        self.file(f"{folder}/phys_state", "5: LinkUp" if up else "3: Disabled")
        self.file(f"{folder}/link_layer", link_layer)
        self.file(f"{folder}/rate", "400 Gb/sec (4X NDR)")
        for index in range(12):
            self.file(f"{folder}/gids/{index}", ZERO_GID)
        return folder

    def gid(self, port: str, index: int, address: str, type_: str, netdev: str) -> None:
        self.file(f"{port}/gids/{index}", address)
        self.file(f"{port}/gid_attrs/types/{index}", type_)
        self.file(f"{port}/gid_attrs/ndevs/{index}", netdev)

    def infiniband_host(self) -> None:
        self.nic("mlx5_0")
        port = self.port("mlx5_0", "InfiniBand")
        self.gid(port, 0, "fe80:0000:0000:0000:946d:ae03:00aa:bbcc", "IB/RoCE v1", "")

    def roce_host(self) -> None:
        """GIDs of a NIC with one IPv4 address: each address as RoCE v1 and as v2."""
        self.nic("mlx5_0")
        self.file("sys/class/net/ens1f0/mtu", 9000)
        port = self.port("mlx5_0", "Ethernet")
        addresses = (
            "fe80:0000:0000:0000:ba3f:d2ff:fe11:2233",
            "2001:0db8:0000:0001:ba3f:d2ff:fe11:2233",
            "0000:0000:0000:0000:0000:ffff:0a01:0007",
        )
        for i, address in enumerate(addresses):
            self.gid(port, 2 * i, address, "IB/RoCE v1", "ens1f0")
            self.gid(port, 2 * i + 1, address, "RoCE v2", "ens1f0")
