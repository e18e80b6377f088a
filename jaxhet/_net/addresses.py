"""Addresses as host:port, and sockets that listen on them."""

import errno
import socket

from jaxhet._errors import UsageError


def split_address(address: str, what: str = "coordinator_address") -> tuple[str, int]:
    """Host and port of "host:port"; `what` names it in the error.

    Raises:
      UsageError: the text has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {address!r} is not host:port, with a port of 1 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)


def join_address(host: str, port: str | int) -> str:
    """host:port of a host name or address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> socket.socket:
    """Binds the coordinator's port.

    Raises:
      UsageError: the port is in use or the address is not one of this machine.
    """
    host, port = split_address(address)
    try:
        every = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=_family(host), backlog=1024, dualstack_ipv6=every
        )
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        other = " (perhaps by the coordinator of a job that runs or has just ended)" * is_in_use
        raise UsageError(
            f"the coordinator can't listen on {address}: {error.strerror or error}{other}; choose"
            " another port or address (JAXHET_COORDINATOR_ADDRESS; JAXHET_COORDINATOR_BIND_ADDRESS"
            " or --bind, where that is given)"
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
