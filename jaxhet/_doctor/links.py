"""The rates of the links below transports."""

import socket

from jaxhet._config import Config
from jaxhet._doctor.nics import ask_transport
from jaxhet._doctor.peer import netdev_to
from jaxhet._net.addresses import split_address
from jaxhet._net.interfaces import here


def link_gb_per_s(config: Config, transport: str, peer_address: str) -> float | None:
    """Rate of this machine's link to another one in each direction, in 1e9 B/s; None: unknown.

    Args:
      config: The job's options.
      transport: Name of the transport.
      peer_address: host:port of the other one.
    """
    mbit_per_s = 0.0
    if transport == "verbs":
        ports = ask_transport(config).ports
        mbit_per_s = 1000 * sum(port["gbps"] for port in ports if not port["problem"])
    elif transport == "socket":
        try:
            netdev = netdev_to(split_address(peer_address)[0])
        except socket.gaierror:
            return None
        mbit_per_s = next((found.speed for found in here() if found.name == netdev), 0)
    return mbit_per_s / 8000 if mbit_per_s > 0 else None
