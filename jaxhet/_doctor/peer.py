"""Whether a peer can be reached, and on which way."""

import ipaddress
import pathlib
import socket
import sys

from jaxhet._doctor.files import read
from jaxhet._doctor.report import Peer
from jaxhet._net.addresses import split_address

_TIMEOUT_S = 5.0


def reach(root: pathlib.Path, address: str) -> Peer:
    """Tries to connect to host:port, once.

    Raises:
      UsageError: the address is none.
    """
    host, port = split_address(address, "--peer")
    try:
        target = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        text = f"{host} is not a name that this machine knows ({error.strerror})"
        return Peer(address, False, text, "")
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as sock:
            target = sock.getpeername()[0]
            text = f"connected from {sock.getsockname()[0]} to {target}"
        return Peer(address, True, text, netdev_to(root, target))
    except TimeoutError:
        text = (
            f"no answer within {_TIMEOUT_S:g} s: a firewall drops it, or the host is down; open"
            " the port there, or fix the ports of a job by JAXHET_TCP_PORT"
        )
    except ConnectionRefusedError:
        text = (
            "refused: the host answers, but nothing listens there, or a firewall rejects it; for a"
            f" test, run `python3 -m http.server {port}` there"
        )
    except OSError as error:
        text = f"{error.strerror or error}; see `ip route get {target}`"
    return Peer(address, False, text, netdev_to(root, target))


def netdev_to(root: pathlib.Path, target: str) -> str:
    """The network device on the way to an address, by the kernel's main routes; "" if none."""
    host, _, zone = target.partition("%")
    if zone:
        return zone
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "lo"
    routes = _routes_v4(root) if address.version == 4 else _routes_v6(root)
    fitting = [route for route in routes if address in route[0]]
    best = min(fitting, key=lambda route: (-route[0].prefixlen, route[1]), default=None)
    return best[2] if best else ""


_Route = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int, str]  # network, metric, netdev
_UP, _REJECT = 0x1, 0x200  # linux/route.h


def _routes_v4(root: pathlib.Path) -> list[_Route]:
    routes: list[_Route] = []
    for line in read(root, "proc/net/route").splitlines()[1:]:
        netdev, network, _, flags, _, _, metric, mask = line.split()[:8]
        # Hexadecimal words in the byte order of the machine.
        address, bits = (int(word, 16).to_bytes(4, sys.byteorder) for word in (network, mask))
        prefix = int.from_bytes(bits, "big").bit_count()
        ours = ipaddress.IPv4Network((address, prefix))
        routes.append((ours, int(metric), _usable(netdev, flags)))
    return routes


def _routes_v6(root: pathlib.Path) -> list[_Route]:
    routes: list[_Route] = []
    for line in read(root, "proc/net/ipv6_route").splitlines():
        network, prefix, _, _, _, metric, _, _, flags, netdev = line.split()[:10]
        ours = ipaddress.IPv6Network((bytes.fromhex(network), int(prefix, 16)))
        routes.append((ours, int(metric, 16), _usable(netdev, flags)))
    return routes


def _usable(netdev: str, flags: str) -> str:
    return netdev if int(flags, 16) & (_UP | _REJECT) == _UP else ""
