"""Loops that start more programs than XLA's CPU client has room for, on devices of one process.

Without jaxhet's settings for threads, XLA ends such a process after 40 s.
"""

import pathlib

import pytest

from tests.support.commands import python
from tests.support.jobs import ROOT

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
    python("-m", *words, timeout_s=100, env={"JAX_NUM_CPU_DEVICES": "4"})
