"""`models.pretrain --balance auto` over islands with unlike arithmetic: shares, replicas, loss."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxhet.testing import FAST_COMPILE
from models.extras.records import METRICS, compare_replicas, read_rows
from tests.support.jobs import ROOT
from tests.support.scripts import environment

_FAST = "--xla_llvm_disable_expensive_passes=true"
_UNLIKE = f"island1:XLA_FLAGS={_FAST} --xla_cpu_max_isa=AVX"


def _losses(ended: subprocess.CompletedProcess[str], folder: pathlib.Path) -> list[float]:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [row["loss"] for row in read_rows(folder / METRICS)]


@pytest.mark.slow
def test_measured_shares_have_the_losses_of_one_world_and_equal_replicas(
    tmp_path: pathlib.Path,
) -> None:
    train = [sys.executable, "-m", "models.pretrain", "--config=tiny", "--mesh=data=2"]
    train += ["--batch=16", "--seq=16", "--accumulate=4", "--steps=6", "--log-every=3", "--digest"]
    launch = ["jaxhet.cli", "launch", "--devices=1", "--island-env", _UNLIKE, "--"]
    islands, world = tmp_path / "islands", tmp_path / "world"
    runs = (
        (
            [sys.executable, "-m", *launch, *train, f"--run-dir={islands}", "--balance=auto"],
            {"XLA_FLAGS": _FAST},
        ),
        ([*train, f"--run-dir={world}"], {"JAX_NUM_CPU_DEVICES": "2", **FAST_COMPILE}),
    )
    ended = [
        subprocess.run(
            command,
            cwd=ROOT,
            env={**environment(), **env},
            text=True,
            capture_output=True,
            timeout=200,
            check=False,
        )
        for command, env in runs
    ]
    losses = [_losses(e, folder) for e, folder in zip(ended, (islands, world), strict=True)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    note = read_rows(islands / METRICS)[0]["balance"]
    assert (len(note["counts"]), sum(note["counts"])) == (2, 8)
    assert min(note["microbatch_seconds"]) > 0
    assert "balance: " in ended[0].stderr
    assert "a microbatch and the rest of a step take island0 " in ended[0].stderr
    replicas = compare_replicas(islands)
    assert replicas.equal, replicas.differences
    assert replicas.complete(2, 2)
