"""A failure also reaches processes without a connection to the failed one."""

import os
import pathlib
import signal
import time

import pytest
from watched import WatchedJob, assert_others_report

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
NUM_PROCESSES = 6
REPORT_WITHIN_S = 15.0
NEEDED = {"JAXHET__CONNECT": "needed"}


@pytest.mark.parametrize(
    ("victim", "number"),
    [(1, signal.SIGKILL), pytest.param(5, signal.SIGSTOP, marks=pytest.mark.slow)],
)
def test_strangers_of_a_failed_process_name_it(victim: int, number: signal.Signals) -> None:
    """Each process exchanges with one other."""
    command = [VICTIM, "100000", "--rails"]
    job = WatchedJob(command, islands=(2, 3), env={**NEEDED, "JAXHET_PEER_TIMEOUT_S": "4"})
    pid = int(job.wait_for(r"@ run (\d+)", victim)[1])
    os.kill(pid, number)
    failed = time.monotonic()
    others = set(range(NUM_PROCESSES)) - {victim}
    try:
        while not all(job.first(i, "PeerError", failed) for i in others):
            assert time.monotonic() - failed < REPORT_WITHIN_S, job.text()
            time.sleep(0.1)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert job.wait() != 0, job.text()
    assert_others_report(job, victim, NUM_PROCESSES, failed - 0.1, REPORT_WITHIN_S)
