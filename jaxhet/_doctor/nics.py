"""RDMA NICs, as sysfs describes them, and the choice of the verbs transport."""

import dataclasses
import ipaddress
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxhet import _ffi
from jaxhet._config import Config
from jaxhet._doctor.files import names, read
from jaxhet._doctor.report import Gid, Nic, Port
from jaxhet._errors import TransportError

_CLASS = "sys/class/infiniband"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Ports that the verbs transport of a job would use.

    Attributes:
      ports: Each port that the transport knows, as `_ffi.nics` describes it.
      problem: Why the transport knows no port, or "".
    """

    ports: Sequence[Mapping[str, Any]]
    problem: str = ""

    def of(self, nic: str, number: int) -> Mapping[str, Any]:
        """A job's use of a port; 0 stands for a NIC that can't be opened."""
        reason = f"not chosen: {self.problem}" if self.problem else ""
        unknown = {"mtu": None, "gid_index": None, "reason": reason, "problem": ""}
        found = (p for p in self.ports if (p["device"], p["port"]) == (nic, number))
        return next(found, unknown)

    def problem_of(self, nic: str) -> str:
        """Why a job can't use any port of a NIC, or ""."""
        if not self.problem and not any(port["device"] == nic for port in self.ports):
            return "libibverbs does not know it: install its provider (Debian: ibverbs-providers)"
        return self.of(nic, 0)["problem"]


def ask_transport(config: Config) -> Choice:
    """Asks the verbs transport, whose answer a job would get too.

    Raises:
      UsageError: an option is out of its range.
    """
    try:
        return Choice(_ffi.nics(config))
    except TransportError as error:
        return Choice((), str(error))


def read_nics(root: pathlib.Path, choice: Choice) -> tuple[Nic, ...]:
    """All NICs; `choice` is the answer of the transport."""
    return tuple(_nic(root, name, choice) for name in names(root, _CLASS))


def _nic(root: pathlib.Path, name: str, choice: Choice) -> Nic:
    folder = f"{_CLASS}/{name}"
    problem = _problem_of_file(root, name)
    if _word(read(root, f"{folder}/node_type")) == "RNIC":
        problem = "it is an iWARP NIC; jaxhet uses InfiniBand and RoCE"
    return Nic(
        name=name,
        problem=problem or choice.problem_of(name),
        ports=tuple(
            _port(root, f"{folder}/ports/{port}", int(port), choice.of(name, int(port)))
            for port in names(root, f"{folder}/ports")
        ),
    )


def _problem_of_file(root: pathlib.Path, name: str) -> str:
    """Why this process can't open the file of a NIC, or ""."""
    verbs = "sys/class/infiniband_verbs"
    found = [f for f in names(root, verbs) if read(root, f"{verbs}/{f}/ibdev") == name]
    if not found:
        return "the kernel offers it to no program: load its module ib_uverbs"
    path = f"dev/infiniband/{found[0]}"
    if not (root / path).exists():
        return f"/{path} is not here; a container needs --device=/dev/infiniband"
    if not os.access(root / path, os.R_OK | os.W_OK):
        return f"this user may not open /{path}"
    return ""


def _port(root: pathlib.Path, folder: str, port: int, chosen: Mapping[str, Any]) -> Port:
    return Port(
        number=port,
        state=_word(read(root, f"{folder}/state")),
        physical_state=_word(read(root, f"{folder}/phys_state")),
        link_layer=read(root, f"{folder}/link_layer"),
        rate=read(root, f"{folder}/rate"),
        active_mtu=chosen["mtu"],
        gids=tuple(_gids(root, folder)),
        gid_index=chosen["gid_index"],
        gid_reason=chosen["reason"],
        problem=chosen["problem"],
    )


def _gids(root: pathlib.Path, port: str) -> Iterator[Gid]:
    for index in names(root, f"{port}/gids"):
        if address := gid_address(read(root, f"{port}/gids/{index}")):
            yield Gid(
                index=int(index),
                address=address,
                type=read(root, f"{port}/gid_attrs/types/{index}"),
                netdev=read(root, f"{port}/gid_attrs/ndevs/{index}"),
            )


def gid_address(text: str) -> str | None:
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
    """The word behind the number in text such as `4: ACTIVE`."""
    return text.partition(": ")[2] or text
