"""Loops that start more programs than XLA's CPU client has room for, on devices of one process.

Without jaxhet's settings for threads, XLA ends such a process after 40 s.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import PYTHONPATH, ROOT

MODEL = str(ROOT / "tests" / "python" / "models" / "golden" / "qwen3")
PRETRAIN = "models.pretrain --config=tiny --mesh=fsdp=4 --seq=16 --batch=4"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            f"models.generate {MODEL} 5,6 7,8 9,3 6,1 --tokens --number=150 --mesh=data=4",
            id="generate",
        ),
        pytest.param(
            f"{PRETRAIN} --steps=2 --eval-every=2 --eval-batches=100 --run-dir=RUN",
            id="evaluation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_command_that_starts_many_programs_ends(command: str, tmp_path: pathlib.Path) -> None:
    words = [word.replace("RUN", str(tmp_path)) for word in command.split()]
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        env={
            **os.environ,
            **FAST_COMPILE,
            "PYTHONPATH": PYTHONPATH,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "4",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
