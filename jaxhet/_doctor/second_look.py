"""A second look at NICs: by pyverbs, if a Python of this machine has it.

Distributions have pyverbs for their own Python, which need not be the one that runs jaxhet.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhet._doctor.nics import gid_address
from jaxhet._doctor.report import Part

_READER = pathlib.Path(__file__).with_name("pyverbs_reader.py")
_PYTHONS = (sys.executable, "/usr/bin/python3")
_TIMEOUT_S = 20.0
_ACTIVE = 4  # IBV_PORT_ACTIVE


@dataclasses.dataclass(frozen=True)
class SeenPort:
    """A port of a NIC.

    Attributes:
      is_active: Whether the port can be used.
      active_mtu: MTU in bytes.
      gids: Index and address of each entry of its table that is not empty.
    """

    is_active: bool
    active_mtu: int
    gids: frozenset[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class SecondLook:
    """The answers of pyverbs.

    Attributes:
      part: Place of pyverbs, or why there is no second look.
      ports: Ports by name of the NIC and number, of NICs that pyverbs can open.
    """

    part: Part
    ports: Mapping[tuple[str, int], SeenPort] = dataclasses.field(default_factory=dict)


def look(pythons: Sequence[str] = _PYTHONS) -> SecondLook:
    """Runs the reader in the first Python that has pyverbs."""
    reason = "no Python here"
    for python in dict.fromkeys(pythons):
        command = [python, "-I", str(_READER)]
        try:
            ended = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
            continue
        if ended.returncode == 0:
            return _parse(python, json.loads(ended.stdout))
        lines = ended.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"{python} ended with exit code {ended.returncode}"
    return SecondLook(Part(False, f"not installed ({reason}); optional: a second look at NICs"))


def _parse(python: str, nics: Mapping[str, Mapping[str, Any]]) -> SecondLook:
    ports = {
        (name, int(number)): SeenPort(
            port["state"] == _ACTIVE, port["active_mtu"], frozenset(_gids(port["gids"]))
        )
        for name, of_nic in nics.items()
        if "error" not in of_nic
        for number, port in of_nic.items()
    }
    count = f"{len(nics)} NIC{'' if len(nics) == 1 else 's'}"
    return SecondLook(Part(True, f"of {python}, which sees {count}"), ports)


def _gids(texts: Sequence[str]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        if address := gid_address(text):
            found.append((index, address))
    return found
