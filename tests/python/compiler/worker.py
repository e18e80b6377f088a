"""Runs a script of this folder in a process of its own, and gives its lines of JSON."""

import json
import pathlib
from typing import Any

from tests.support.commands import python

_ROOT = pathlib.Path(__file__).parents[3]


def run(script: str, *arguments: str, timeout_s: int, **env: str) -> dict[str, Any]:
    """Case name to the script's result."""
    program = pathlib.Path(__file__).with_name(script)
    result = python(program, *arguments, timeout_s=timeout_s, env={"XLA_FLAGS": "", **env})
    return dict(json.loads(line) for line in result.stdout.splitlines())
