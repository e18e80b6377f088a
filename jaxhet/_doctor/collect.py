"""Collects the facts of a report, and the findings about them."""

import pathlib

from jaxhet import _config, _ffi
from jaxhet._doctor import distance, findings, gpus, host, nics, paths, peer, second_look, software
from jaxhet._doctor.report import SCHEMA, Report

ROOT = pathlib.Path("/")


def collect(peer_address: str | None = None, root: pathlib.Path = ROOT) -> Report:
    """The report on this machine.

    Args:
      peer_address: host:port that should be reached.
      root: Where the machine's /sys, /proc, /dev and /boot are.

    Raises:
      UsageError: the peer's address, or an option in the environment, is not valid.
    """
    reached = peer.reach(peer_address) if peer_address else None
    route = reached.netdev if reached else ""
    second = second_look.look()
    programs = software.read_software(second.part)
    found = nics.read_nics(root, nics.ask_transport(_config.resolve()), route)
    vendors = gpus.read_vendors(root)
    kernel = host.read_host(root)
    ways = paths.try_paths()
    problems = (
        *findings.find(programs, vendors, found, kernel, ways, reached),
        *findings.compare(found, second),
    )
    return Report(
        schema=SCHEMA,
        ok=all(finding.level != "error" for finding in problems),
        findings=problems,
        software=programs,
        vendors=vendors,
        nics=found,
        distances=distance.read_distances(root, vendors, found),
        host=kernel,
        paths=ways,
        device_transports=tuple(t for t in _ffi.DEVICE_TRANSPORTS if t != "local"),
        peer=reached,
    )
