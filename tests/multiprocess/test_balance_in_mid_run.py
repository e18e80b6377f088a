"""`--balance auto` with an island that stalls once, and whose layers later sleep longer."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from jaxhet.testing import FAST_COMPILE
from models.extras.records import METRICS, read_rows
from models.extras.shares import AUTO, EVEN
from tests.support.jobs import ROOT
from tests.support.scripts import environment
from tests.support.waiting import wait_until

STALL, SLOW, STEPS, WINDOW, SHARES = 20, 50, 90, 5, 8
QUICK_S, SLOW_S = 0.001, 0.006  # sleep of a layer, so that load on the machine decides nothing


class Job:
    """A training on two islands, whose layers sleep as long as a file of each island says."""

    def __init__(self, folder: pathlib.Path, balance: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        self.files = [folder.with_suffix(f".{i}") for i in range(2)]
        for file in self.files:
            file.write_text(str(QUICK_S))
        where = [f"--island-env=island{i}:LAYER_S={file}" for i, file in enumerate(self.files)]
        launch = ["jaxhet.cli", "launch", "--islands=2", "--devices=1", *where, "--"]
        run = f"--mesh=data=2 --batch=32 --seq=16 --accumulate={SHARES} --balance={balance}"
        run += f" --steps={STEPS} --log-every={WINDOW} --run-dir={folder}"
        program = [sys.executable, "-m", "tests.multiprocess.several_runs", run]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *launch, *program],
                cwd=ROOT,
                env={**environment(), **FAST_COMPILE, "JAX_LOG_COMPILES": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, step: int) -> int:
        """Waits until this number of steps is written; returns the number that is."""
        wait_until(lambda: len(self.rows()) >= step or self._process.poll() is not None, 300)
        return len(self.rows())

    def finish(self) -> str:
        """Waits for the end; returns everything that was printed."""
        assert self._process.wait(300) == 0, self._log.read_text()
        return self._log.read_text()

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS
        return read_rows(path) if path.exists() else []

    def choices(self) -> list[tuple[int, list[int]]]:
        """The first step after each measurement, and the shares from then on."""
        return [(r["step"], r["balance"]["counts"]) for r in self.rows() if "balance" in r]

    def process_of(self, island: int) -> int:
        """The process of an island."""
        variable = f"LAYER_S={self.files[island]}".encode()
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                if variable in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        (process,) = found
        return process


@pytest.mark.slow
def test_stall_is_ignored_and_slow_island_is_relieved_within_20_steps(
    tmp_path: pathlib.Path,
) -> None:
    job = Job(tmp_path / AUTO, AUTO)
    job.wait_for(STALL)
    stalled = job.process_of(1)
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(2)
    os.kill(stalled, signal.SIGCONT)
    begun = job.wait_for(SLOW)
    (tmp_path / "slow").write_text(str(SLOW_S))
    (tmp_path / "slow").rename(job.files[1])
    text = job.finish()
    assert max(row["seconds"] for row in job.rows()[:begun]) > 2 / WINDOW
    before = [counts[1] for step, counts in job.choices() if step <= begun]
    assert min(before) > 0.5 * before[0], job.choices()
    relieved = [step for step, counts in job.choices() if counts[1] <= 0.5 * before[-1]]
    # The steps of the window after `begun` may be done, and not be written yet.
    assert relieved, job.choices()
    assert relieved[0] - 1 <= begun + WINDOW + 20, job.choices()
    kept = [counts[1] for step, counts in job.choices() if step >= relieved[0]]
    assert max(kept) <= 0.75 * before[-1], job.choices()
    assert text.count("Finished XLA compilation of jit(step)") == 2, "compiled anew"
    even = Job(tmp_path / EVEN, EVEN)
    even.finish()
    losses = [[row["loss"] for row in rows] for rows in (job.rows(), even.rows())]
    np.testing.assert_allclose(*losses, rtol=1e-3)
