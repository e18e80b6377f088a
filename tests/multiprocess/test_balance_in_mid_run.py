"""`--balance auto` on real cores: an island that becomes slow, and one that stalls once."""

import os
import pathlib
import signal
import subprocess
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.efficiency import AUTO, EVEN, PINNED, burning, on_cores
from models.extras.records import METRICS, read_rows
from tests.support.jobs import ROOT
from tests.support.scripts import environment
from tests.support.waiting import wait_until

CORES = sorted(os.sched_getaffinity(0))[:2]
STALL, SLOW, STEPS, WINDOW, SHARES = 20, 50, 90, 5, 8


class Job:
    """A training on two islands, each on a core of its own."""

    def __init__(self, folder: pathlib.Path, balance: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        train = [*PINNED, "-m", "models.pretrain", "--config=tiny", "--mesh=data=2"]
        train += ["--batch=128", "--seq=64", f"--accumulate={SHARES}", f"--balance={balance}"]
        train += [f"--steps={STEPS}", f"--log-every={WINDOW}", f"--run-dir={folder}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                on_cores([*map(str, CORES)], train),
                cwd=ROOT,
                env={**environment(), "JAX_LOG_COMPILES": "1"},
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

    def process_on(self, core: int) -> int:
        """The process of the island on a core."""
        (found,) = (
            int(path.name)
            for path in pathlib.Path("/proc").glob("[0-9]*")
            if f"--run-dir={self.folder}".encode() in (path / "cmdline").read_bytes().split(b"\0")
            and os.sched_getaffinity(int(path.name)) == {core}
        )
        return found


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="two islands need two cores")
def test_stall_is_ignored_and_slow_island_is_relieved_within_20_steps(
    tmp_path: pathlib.Path,
) -> None:
    job = Job(tmp_path / AUTO, AUTO)
    job.wait_for(STALL)
    stalled = job.process_on(CORES[1])
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(2)
    os.kill(stalled, signal.SIGCONT)
    begun = job.wait_for(SLOW)
    with burning((0, 4), [*map(str, CORES)]):
        text = job.finish()
    assert max(row["seconds"] for row in job.rows()[:begun]) > 2 / WINDOW
    before = [counts[1] for step, counts in job.choices() if step <= begun]
    # Other work on the machine can move shares as well, but not by half.
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
