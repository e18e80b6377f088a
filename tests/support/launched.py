"""Programs that `jaxhet launch` starts, with one CPU device in each process."""

import subprocess
import sys

from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import ROOT
from tests.support.scripts import environment


def launched(
    *program: str, islands: int = 2, options: tuple[str, ...] = (), timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m PROGRAM` as each process of a job, until the job ends.

    Args:
      *program: Module and arguments.
      islands: Number of islands, each of one process.
      options: Further options of `jaxhet launch`.
      timeout_s: Longest time of the job.
    """
    launch = [sys.executable, "-m", "jaxhet.cli", "launch", f"--islands={islands}", "--devices=1"]
    return subprocess.run(
        [*launch, *options, "--", sys.executable, "-m", *program],
        cwd=ROOT,
        env={**environment(), **FAST_COMPILE},
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
