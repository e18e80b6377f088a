"""Network interfaces over which `socket` spreads its data connections, and the pairs of them."""

import dataclasses
import ipaddress
import socket
from collections.abc import Sequence

from jaxhet._config import Config
from jaxhet._errors import TransportError, UsageError
from jaxhet._options import NameList

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 6}
_ORIGINS = {"named": True, "found": False}


@dataclasses.dataclass(frozen=True)
class Interface:
    """An address of a network interface of one process's machine.

    Attributes:
      name: Such as "eth1".
      address: Address of this machine there, with its network.
      is_named: Whether the option `socket_interfaces` names it; else jaxhet has found it.
      port: Port on which the process listens; 0 before it does.
      is_ordinary: Neither a loopback nor a point-to-point interface (VPN); known on its machine.
      speed: Mbit/s; 0 if unknown; known on its machine.
    """

    name: str
    address: Address
    is_named: bool = False
    port: int = 0
    is_ordinary: bool = True
    speed: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def announced(self) -> str:
        """The text that stands for the interface in a `ProcessInfo`; `parse` reads it."""
        origin = next(word for word, is_named in _ORIGINS.items() if is_named == self.is_named)
        return f"{self.name} {self.address} {origin} {self.port}"

    @classmethod
    def parse(cls, text: str) -> "Interface":
        """The interface in a peer's `ProcessInfo`.

        Raises:
          TransportError: the text is not one of `announced`.
        """
        try:
            name, address, origin, port = text.split(" ")
            if not 0 < int(port) < 65536:
                raise ValueError(f"there is no port {port}")
            return cls(name, ipaddress.ip_interface(address), _ORIGINS[origin], int(port))
        except (ValueError, KeyError) as error:
            raise TransportError(
                f"{text!r} of a process's description is not a network interface"
                f" ({error}); use one version of jaxhet in the whole job"
            ) from error


def chosen(config: Config, main: str) -> tuple[Interface, ...]:
    """Interfaces on which this process offers data connections to its peers.

    Args:
      config: The options.
      main: Host address on which the process listens.

    Raises:
      UsageError: `socket_interfaces` names an interface that this machine does not have.
    """
    if "socket" not in config.transports:
        return ()
    if config.socket_interfaces:
        return tuple(named(config.socket_interfaces, here()))
    if config.socket_address or config.socket_advertise or main.startswith("127.") or main == "::1":
        return ()
    return tuple(suitable(here(), main))


def here() -> list[Interface]:
    """Addresses of this machine's interfaces that are up, except link-local ones of IPv6."""
    import psutil  # takes a while to import, and not every job needs it

    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        is_ordinary = {"loopback", "pointopoint"}.isdisjoint(stats[name].flags.split(","))
        for entry in addresses:
            version = _FAMILIES.get(entry.family)
            if version is None or "%" in entry.address:
                continue
            prefix = int(ipaddress.ip_address(entry.netmask)).bit_count() if entry.netmask else ""
            text = f"{entry.address}/{prefix}" if entry.netmask else entry.address
            address = ipaddress.ip_interface(text)
            speed = stats[name].speed
            found.append(Interface(name, address, is_ordinary=is_ordinary, speed=speed))
    return found


def named(wanted: Sequence[str], found: Sequence[Interface]) -> list[Interface]:
    """The interfaces that the names or networks (CIDR) in `wanted` select, in this order. Pure.

    Raises:
      UsageError: there is no such interface.
    """
    names = NameList.parse(wanted)
    interfaces: dict[Address, Interface] = {}
    for part in [",".join(wanted)] if names.excludes else names.parts:
        if names.excludes:
            matching = [
                entry
                for entry in found
                if entry.is_ordinary and not any(_matches(entry, p, names) for p in names.parts)
            ]
        else:
            matching = [entry for entry in found if _matches(entry, part, names)]
        if not matching:
            have = ", ".join(f"{entry.name} ({entry.address})" for entry in found)
            raise UsageError(
                "JAXHET_SOCKET_INTERFACES or NCCL_SOCKET_IFNAME: no interface of this machine that"
                f" is up is called, or has an address in, {part!r}; there are {have}"
            )
        for entry in matching:
            interfaces.setdefault(entry.address, dataclasses.replace(entry, is_named=True))
    return list(interfaces.values())


def suitable(found: Sequence[Interface], main: str) -> list[Interface]:
    """Interfaces for users who name none; the interface with the address `main` is first. Pure.

    Each interface counts with one private address of the IP version of `main`. An interface with a
    known speed below the fastest one's is left out: an exchange would wait for it.

    Args:
      found: Interfaces as returned by `here`.
      main: Host address on which the process listens.
    """
    try:
        version = ipaddress.ip_address(main).version
    except ValueError:  # a name
        version = 4
    usable: dict[str, Interface] = {}
    for entry in found:
        if not entry.is_ordinary or entry.address.version != version:
            continue
        address = entry.address.ip
        is_local = address.is_private and not address.is_link_local
        if str(address) == main or (is_local and entry.name not in usable):
            usable[entry.name] = entry
    fastest = max((entry.speed for entry in usable.values()), default=0)
    fast = [entry for entry in usable.values() if entry.speed in (0, fastest)]
    return sorted(fast, key=lambda entry: str(entry.address.ip) != main)


def pairs(
    first: Sequence[Interface], second: Sequence[Interface]
) -> list[tuple[Interface, Interface]]:
    """Pairs of interfaces of two machines to connect. Pure.

    Both ends call it with the machines in the same order. Interfaces of one network form a pair.
    Interfaces without such a partner that both users have named form pairs in the order of their
    names. An address that both machines have (a container bridge, or the same machine) reaches
    nobody else and is left out.
    """
    both = {i.address.ip for i in first} & {i.address.ip for i in second}
    left = [i for i in second if i.address.ip not in both]
    joined, alone = [], []
    for one in first:
        if one.address.ip in both:
            continue
        other = next((i for i in left if i.address.network == one.address.network), None)
        if other is None:
            alone.append(one)
        else:
            left.remove(other)
            joined.append((one, other))
    by_order = zip((i for i in alone if i.is_named), (i for i in left if i.is_named), strict=False)
    return joined + list(by_order)


def _matches(entry: Interface, part: str, names: NameList) -> bool:
    if names.fits(entry.name, part):
        return True
    try:
        return entry.address.ip in ipaddress.ip_network(part, strict=False)
    except ValueError:  # a name
        return False
