"""Collects the facts of a report, and the findings about them."""

import pathlib

from jaxhet import _config
from jaxhet._doctor import findings, gpus, host, nics, second_look, software
from jaxhet._doctor.report import SCHEMA, Report

ROOT = pathlib.Path("/")


def collect(root: pathlib.Path = ROOT) -> Report:
    """The report on this machine.

    Args:
      root: Folder with the machine's /sys, /proc, /dev and /boot.

    Raises:
      UsageError: an option in the environment is not valid.
    """
    second = second_look.look()
    programs = software.read_software(second.part)
    found = nics.read_nics(root, nics.ask_transport(_config.resolve()))
    vendors = gpus.read_vendors(root)
    kernel = host.read_host(root)
    problems = (
        *findings.find(programs, vendors, found, kernel),
        *findings.compare(found, second),
    )
    return Report(
        schema=SCHEMA,
        ok=all(finding.level != "error" for finding in problems),
        findings=problems,
        software=programs,
        vendors=vendors,
        nics=found,
        host=kernel,
    )
