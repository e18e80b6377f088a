"""Runs a script of this folder in a process of its own, and gives its lines of JSON."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).parents[3]


def run(script: str, *arguments: str, timeout_s: int, **env: str) -> dict[str, Any]:
    """Case name to the script's result."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_FLAGS"))}
    result = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).with_name(script)), *arguments],
        env={**kept, **env, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return dict(json.loads(line) for line in result.stdout.splitlines())
