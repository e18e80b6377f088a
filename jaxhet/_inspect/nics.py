"""RDMA NICs, from /sys/class/infiniband; the GID that a connection should use."""

import ipaddress
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from jaxhet import _ffi
from jaxhet._inspect.files import names, number, read
from jaxhet._inspect.report import Gid, Nic, Port

_CLASS = "sys/class/infiniband"
_MTUS = (4096, 2048, 1024, 512, 256)
# GRH, UDP, BTH, XRC and atomic headers, ICRC: what the kernel leaves room for (rdma/ib_addr.h).
_ROCE_HEADER_BYTES = 40 + 8 + 12 + 4 + 28 + 4


def read_nics(
    root: pathlib.Path, route: str = "", active_mtus: Mapping[tuple[str, int], int] | None = None
) -> tuple[Nic, ...]:
    """All NICs.

    Args:
      root: The root folder.
      route: The network device on the way to the peer, if one is asked about.
      active_mtus: By NIC and port, where sysfs does not have them.
    """
    return tuple(_nic(root, name, route, active_mtus or {}) for name in names(root, _CLASS))


def choose_gid(link_layer: str, gids: Sequence[Gid], route: str = "") -> tuple[int | None, str]:
    """The index of the GID to use, or None; and why.

    RoCE v2, on a network device that is up, IPv4 before global IPv6, the lowest index of those.
    `route` is the network device on the way to the peer, if that is known.
    """
    if link_layer == "InfiniBand":
        if not gids:
            return None, "the port has no GID; is a subnet manager running?"
        return gids[0].index, "InfiniBand: the port's own"
    if link_layer != "Ethernet":
        return None, f"its link layer is {link_layer}; jaxhet uses InfiniBand and RoCE"
    if not gids:
        return None, "the port has no GID; bring its network device up and give it an address"
    usable = [gid for gid in gids if not _problem(gid)]
    if not usable:
        problems = "; ".join(f"{gid.index} {_problem(gid)}" for gid in gids)
        return None, (
            f"no GID can be used: {problems}; give the port's network device an IPv4 or global IPv6"
            " address"
        )
    best = min(usable, key=lambda gid: not _is_ipv4(gid))
    why = f"RoCE v2, {'IPv4' if _is_ipv4(best) else 'global IPv6'}, on {best.netdev}"
    if route and route == best.netdev:
        why += ", the way to the peer"
    elif route:
        why += f"; the way to the peer is {route}"
    return best.index, why


def _problem(gid: Gid) -> str:
    """Why a RoCE port's GID can't be chosen, or ""."""
    if gid.type != "RoCE v2":
        return "is RoCE v1, which is not routed"
    if not gid.netdev:
        return "has no network device here (another network namespace?)"
    if not gid.netdev_up:
        return f"is on {gid.netdev}, which is down"
    return "is link-local" if ipaddress.IPv6Address(gid.address).is_link_local else ""


def _is_ipv4(gid: Gid) -> bool:
    return ipaddress.IPv6Address(gid.address).ipv4_mapped is not None


def roce_mtu(netdev_mtu: int) -> int | None:
    """The MTU of a RoCE port by that of its network device; None if that is too small."""
    return next((mtu for mtu in _MTUS if mtu + _ROCE_HEADER_BYTES <= netdev_mtu), None)


def _nic(
    root: pathlib.Path, name: str, route: str, active_mtus: Mapping[tuple[str, int], int]
) -> Nic:
    folder = f"{_CLASS}/{name}"
    device_file, problem = _device_file(root, name)
    if _word(read(root, f"{folder}/node_type")) == "RNIC":
        problem = "it is an iWARP NIC; jaxhet uses InfiniBand and RoCE"
    return Nic(
        name=name,
        pci=_ffi.pci_address(root / folder),
        numa_node=number(read(root, f"{folder}/device/numa_node"), -1),
        model=read(root, f"{folder}/board_id") or read(root, f"{folder}/node_desc"),
        firmware=read(root, f"{folder}/fw_ver"),
        device_file=device_file,
        problem=problem,
        ports=tuple(
            _port(
                root, f"{folder}/ports/{port}", int(port), route, active_mtus.get((name, int(port)))
            )
            for port in names(root, f"{folder}/ports")
        ),
    )


def _device_file(root: pathlib.Path, name: str) -> tuple[str, str]:
    verbs = "sys/class/infiniband_verbs"
    found = [f for f in names(root, verbs) if read(root, f"{verbs}/{f}/ibdev") == name]
    if not found:
        return "", "the kernel offers it to no program: load its module ib_uverbs"
    path = f"dev/infiniband/{found[0]}"
    if not (root / path).exists():
        return f"/{path}", f"/{path} is not here; a container needs --device=/dev/infiniband"
    if not os.access(root / path, os.R_OK | os.W_OK):
        return f"/{path}", f"this user may not open /{path}"
    return f"/{path}", ""


def _port(root: pathlib.Path, folder: str, port: int, route: str, active_mtu: int | None) -> Port:
    link_layer = read(root, f"{folder}/link_layer")
    gids = tuple(_gids(root, folder))
    gid_index, gid_reason = choose_gid(link_layer, gids, route)
    if active_mtu is None and link_layer == "Ethernet":
        netdevs = [gid.netdev for gid in gids if gid.index == gid_index] or [g.netdev for g in gids]
        mtus = [number(read(root, f"sys/class/net/{netdev}/mtu"), 0) for netdev in netdevs]
        active_mtu = roce_mtu(mtus[0]) if mtus else None
    return Port(
        number=port,
        state=_word(read(root, f"{folder}/state")),
        physical_state=_word(read(root, f"{folder}/phys_state")),
        link_layer=link_layer,
        rate=read(root, f"{folder}/rate"),
        active_mtu=active_mtu,
        gids=gids,
        gid_index=gid_index,
        gid_reason=gid_reason,
    )


def _gids(root: pathlib.Path, port: str) -> Iterator[Gid]:
    for index in names(root, f"{port}/gids"):
        if address := _address(read(root, f"{port}/gids/{index}")):
            netdev = read(root, f"{port}/gid_attrs/ndevs/{index}")
            state = read(root, f"sys/class/net/{netdev}/operstate") if netdev else ""
            yield Gid(
                index=int(index),
                address=address,
                type=read(root, f"{port}/gid_attrs/types/{index}"),
                netdev=netdev,
                netdev_up=state in ("up", "unknown"),  # unknown: the driver does not look
            )


def _address(text: str) -> str | None:
    """A GID as an IPv6 address; None for an empty entry, which is zero, or has no interface id."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    if int(address) & (2**64 - 1) == 0:
        return None
    mapped = address.ipv4_mapped
    return f"::ffff:{mapped}" if mapped else str(address)


def _word(text: str) -> str:
    """The word in `4: ACTIVE`."""
    return text.partition(": ")[2] or text
