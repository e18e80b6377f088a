"""Runs a script of this folder in a process of its own, and gives its lines of JSON."""

import json
import pathlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.commands import python

_ROOT = pathlib.Path(__file__).parents[3]


def run(script: str, *arguments: str, timeout_s: int, **env: str) -> dict[str, Any]:
    """Case name to the script's result."""
    program = pathlib.Path(__file__).with_name(script)
    result = python(program, *arguments, timeout_s=timeout_s, env={"XLA_FLAGS": "", **env})
    return dict(json.loads(line) for line in result.stdout.splitlines())


def tell_each[T](cases: Mapping[str, T], run: Callable[[T], Any]) -> None:
    """Prints a line of JSON for each case: its name, and its result or `{"error": …}`."""
    for name, case in cases.items():
        try:
            result = run(case)
        except Exception:  # reported with the others
            result = {"error": traceback.format_exc()}
        print(json.dumps([name, result]), flush=True)
