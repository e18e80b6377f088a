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
# One process of the job exchanges with all others when these have left.
LATE = """
import sys, time
import jax, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": -1})
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("x")), lambda i: np.ones(4)[i])
if jax.process_index() == int(sys.argv[1]):
    time.sleep(2)
    try:
        print("WRONG", jaxhet.jit(lambda x: x.sum())(x), flush=True)
    except Exception as error:
        print("late:", error, flush=True)
"""


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


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_peer_that_has_left_before_it_is_needed_is_named(late: int) -> None:
    job = WatchedJob(["-c", LATE, str(late)], islands=(2, 2), env=NEEDED)
    job.wait()  # with code 0: the program has dealt with the error
    line = job.first(late, "late:")
    assert line is not None, job.text()
    assert not job.first(None, "Exception in thread"), job.text()
    assert "has left the job" in line.text
    assert "All processes must run the same programs" in line.text
