"""Small jobs without the launcher: one script, each process's environment, and how they ended."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from benchmarks import gpus
from jaxhet.testing import free_port
from tests.support import forked
from tests.support.jobs import ROOT

ON_GPUS_TOO = pytest.mark.parametrize("platform", ["cpu", "cuda"])


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    text: str


def run(script: str, *envs: Mapping[str, str], timeout_s: float = 60) -> list[Ended]:
    """Runs `script` once with each environment, all at the same time."""
    base = environment()
    if all(forked.can_fork(base, env) for env in envs):
        ended = forked.run(script, [{**base, **env} for env in envs], timeout_s)
        return [Ended(*each) for each in ended]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**base, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for env in envs
    ]
    outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    return [Ended(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]


def environment() -> dict[str, str]:
    """This process's environment without options of jaxhet; JAX uses CPUs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def job(num_processes: int = 2, **common: str) -> list[dict[str, str]]:
    """The environments of a good job of one process per island."""
    shared = {
        "JAXHET_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAXHET_NUM_PROCESSES": str(num_processes),
        "JAXHET_JOB_SECRET": "a secret of tests",
        "JAXHET_CONNECT_TIMEOUT_S": "10",
        **common,
    }
    return [
        {**shared, "JAXHET_PROCESS_ID": str(i), "JAXHET_ISLAND": f"island{i}"}
        for i in range(num_processes)
    ]


def on(platform: str, envs: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    """The environments `envs` on CPUs, or with a GPU for each; skips the test where GPUs lack."""
    if platform == "cpu":
        return envs
    if reason := gpus.why_fewer_than(len(envs)):
        pytest.skip(reason)
    names, _ = gpus.visible()
    return [
        {**env, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": name}
        for env, name in zip(envs, names, strict=False)
    ]
