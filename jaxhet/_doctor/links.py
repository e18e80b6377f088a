"""The rates of the links below transports."""

import pathlib
import socket

from jaxhet._config import Config
from jaxhet._doctor.files import number, read
from jaxhet._doctor.nics import ask_transport
from jaxhet._doctor.peer import netdev_to
from jaxhet._net.addresses import split_address


def link_gb_per_s(
    root: pathlib.Path, config: Config, transport: str, peer_address: str
) -> float | None:
    """This machine's link to another one, each way, in 1e9 B/s; None if it is not known.

    Args:
      root: The root folder.
      config: The job's options.
      transport: Name of the transport.
      peer_address: host:port of the other one.
    """
    mbit_per_s = 0.0
    if transport == "verbs":
        ports = ask_transport(config).ports
        mbit_per_s = 1000 * sum(port["gbps"] for port in ports if not port["problem"])
    elif transport == "socket":
        name = f"sys/class/net/{_netdev(root, peer_address)}/speed"
        mbit_per_s = number(read(root, name), -1)  # the kernel says -1 for an unknown speed
    return mbit_per_s / 8000 if mbit_per_s > 0 else None


def _netdev(root: pathlib.Path, peer_address: str) -> str:
    host, port = split_address(peer_address)
    try:
        return netdev_to(root, str(socket.getaddrinfo(host, port)[0][4][0]))
    except socket.gaierror:
        return ""
