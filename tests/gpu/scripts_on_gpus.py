"""Scripts of jobs on GPUs, or on CPUs, where a slow test tries the script itself."""

import pytest

from benchmarks import gpus
from tests.faults.watched import WatchedJob
from tests.multiprocess.two_islands import SET_UP

ON_BOTH = pytest.mark.parametrize("platform", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)])

# Variables of commands that choose GPUs, and compile as by default.
ON_GPUS = {"JAX_PLATFORMS": "", "XLA_FLAGS": ""}


def require_gpus(platform: str, number: int = 2) -> None:
    """Skips a test of GPUs where there are fewer."""
    if platform == "cuda" and (reason := gpus.why_fewer_than(number)):
        pytest.skip(reason)


def told(platform: str, script: str, **env: str) -> tuple[list[list[str]], WatchedJob]:
    """The lines of both processes of a job of two islands, and the job, which has ended."""
    require_gpus(platform)
    env |= {"JAX_PLATFORMS": "cpu" if platform == "cpu" else ""}
    job = WatchedJob(["-c", SET_UP + script], islands=2, env=env)
    job.wait(200)
    return [[line.text for line in job.lines if line.process == p] for p in range(2)], job
