"""Commands that tests run to their end, on CPU devices."""

import os
import subprocess
import sys
from collections.abc import Mapping

from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import PYTHONPATH, ROOT
from tests.support.scripts import environment

Word = str | os.PathLike[str]


def python(
    *words: Word,
    env: Mapping[str, str] | None = None,
    folder: Word = ROOT,
    timeout_s: float = 250,
    exit_code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs Python without the options of jaxhet that this process has.

    Args:
      *words: Words of the command line.
      env: Further variables.
      folder: Folder in which it runs.
      timeout_s: Longest time.
      exit_code: Exit code that it must have; None for any.
    """
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment(), **FAST_COMPILE, "PYTHONPATH": PYTHONPATH, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert exit_code in (None, ended.returncode), ended.stdout + ended.stderr
    return ended


def launch(*options: Word) -> list[Word]:
    """Words by which `python` starts a job, each of whose processes runs Python."""
    return ["-m", "jaxhet.cli", "launch", *options, "--", sys.executable]
