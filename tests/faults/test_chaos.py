"""Random kills, stops, cuts, disturbances and corruptions of jobs over `process_vm` and `socket`.

Twenty rounds run with the C++ tests; the thousands are slow.
"""

import os
import subprocess

import pytest

from tools.programs import build

_ROUNDS = "2000"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_faults_end_in_results_or_named_errors() -> None:
    """Exits with 1 for a wrong result, a hang, a crash, an unnamed error, or anything left."""
    env = {"CHAOS_ROUNDS": _ROUNDS, **os.environ}
    command = [str(build("chaos_test")), "--gtest_filter=*.RandomFaults*"]
    ended = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rounds = [line for line in ended.stderr.splitlines() if line.startswith("chaos ")]
    assert len(rounds) == int(env["CHAOS_ROUNDS"])
