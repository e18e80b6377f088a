"""Whether a peer can be reached, and through which network device."""

import socket

from jaxhet._doctor.report import Peer
from jaxhet._net.addresses import split_address
from jaxhet._net.interfaces import here

_TIMEOUT_S = 5.0


def reach(address: str) -> Peer:
    """Tries to connect to host:port, once.

    Raises:
      UsageError: the address is not host:port.
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
        return Peer(address, True, text, netdev_to(target))
    except TimeoutError:
        text = (
            f"no answer within {_TIMEOUT_S:g} s: a firewall drops it, or the host is down; open"
            " the port there, or fix the ports of a job by JAXHET_SOCKET_PORT"
        )
    except ConnectionRefusedError:
        text = (
            "refused: the host answers, but nothing listens there, or a firewall rejects it; for a"
            f" test, run `python3 -m http.server {port}` there"
        )
    except OSError as error:
        text = f"{error.strerror or error}; see `ip route get {target}`"
    return Peer(address, False, text, netdev_to(target))


def netdev_to(target: str) -> str:
    """The network device that the kernel uses to reach an address; "" if there is none."""
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # sends nothing
            own = sock.getsockname()[0]
    except OSError:
        return ""
    return next((found.name for found in here() if str(found.address.ip) == own), "")
