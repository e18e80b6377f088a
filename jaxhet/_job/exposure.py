"""Whether data of a job without encryption would cross a public network."""

import ipaddress
import socket
import warnings
from collections.abc import Iterable

from jaxhet._config import Config
from jaxhet._errors import UsageError
from jaxhet._job.process_info import ProcessInfo
from jaxhet._net.addresses import split_address
from jaxhet._net.interfaces import Interface


def check(config: Config, process: int, members: Iterable[ProcessInfo], coordinator: str) -> None:
    """Refuses a job that sends data over a public network and does not say how to protect it.

    A user who has set the option `encryption` to off gets a warning instead. Processes of this
    process's own host do not count: data to them stays on the host.

    Args:
      config: The options.
      process: This process.
      members: All processes of the job.
      coordinator: Address of the coordinator's host; "" if that is this host.

    Raises:
      UsageError: An address is public, and `encryption` is off because the user did not set it.
    """
    if config.encryption != "off":
        return
    public = next(filter(_is_public, _hosts(process, members, coordinator)), None)
    if public is None:
        return
    problem = (
        f"this job sends its data unprotected to {public}, which is an address of the internet"
    )
    if "encryption" not in config.given:
        raise UsageError(
            f"{problem}: set JAXHET_ENCRYPTION=full (or auth: against changes alone) in all"
            " processes; or JAXHET_ENCRYPTION=off, if a VPN or a firewall keeps strangers from that"
            " network"
        )
    warnings.warn(f"{problem}, because JAXHET_ENCRYPTION is off", stacklevel=2)


def _hosts(process: int, members: Iterable[ProcessInfo], coordinator: str) -> list[str]:
    """Addresses of other hosts, the coordinator's first."""
    infos = {info.process: info for info in members}
    hosts = [coordinator] if coordinator else []
    for info in infos.values():
        if info.host_id != infos[process].host_id:
            hosts.append(split_address(info.address)[0])
            hosts += (str(Interface.parse(text).address.ip) for text in info.interfaces)
    return hosts


def _is_public(host: str) -> bool:
    """Whether a host's name or address belongs to the public internet."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:  # the connection will fail, and say so
        return False
    return any(_is_global(str(address).partition("%")[0]) for address in found)


def _is_global(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_global
