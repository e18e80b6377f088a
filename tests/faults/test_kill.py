"""A process is killed while it joins, or while a checkpoint is written: the others say so in time.

`test_matrix.py` has the other moments and ways of a failure.
"""

import os
import pathlib
import random
import signal
import time

import pytest
from watched import WatchedJob, assert_others_report

pytestmark = pytest.mark.early

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
NUM_PROCESSES = 3
STARTING_WITHIN_S = 20.0  # a process that imports JAX reports only after that
KILLED = 128 + signal.SIGKILL
TERM_WITHIN_S = 5.0

_random = random.Random(20)
# (seconds after the victim began to import and to join, victim); all but the first are slow.
MOMENTS = [(round(_random.uniform(0, 3.0), 2), _random.randrange(NUM_PROCESSES)) for _ in range(8)]


@pytest.mark.parametrize(
    ("delay_s", "victim"),
    [pytest.param(*m, marks=[pytest.mark.slow] if i else []) for i, m in enumerate(MOMENTS)],
)
def test_others_report_a_process_killed_while_it_joins(delay_s: float, victim: int) -> None:
    job = WatchedJob([VICTIM, "100000"], islands=NUM_PROCESSES)
    pid = int(job.wait_for(r"@ connect (\d+)", victim)[1])
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    code = job.wait()
    assert code == KILLED, job.text()
    assert_others_report(job, victim, NUM_PROCESSES, killed - 0.1, STARTING_WITHIN_S)
    assert job.first(None, rf"process {victim}\b.*SIGKILL"), job.text()


# Checkpoints are written for a minute after the arrays are safe.
_SLOW_CHECKPOINT = """
import os, time
from models import pretrain
from models.extras import checkpoint

def finish(self, protection):
    with protection:
        print("@ saving", os.getpid(), flush=True)
        for _ in range(600):
            os.utime(self._folder)
            time.sleep(0.1)

checkpoint.Checkpoints._finish = finish
pretrain.main()
"""


@pytest.mark.slow
def test_sigterm_ends_a_failed_training_that_waits_for_its_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    train = ["-c", _SLOW_CHECKPOINT, "--config=tiny", "--mesh=data=2", "--batch=4", "--seq=16"]
    options = [f"--run-dir={tmp_path}", "--steps=100000", "--checkpoint-every=2"]
    job = WatchedJob([*train, *options], islands=2, grace_s=60, fast_compile=True)
    pid = int(job.wait_for(r"@ saving (\d+)", 1)[1])
    os.kill(pid, signal.SIGKILL)
    job.wait_for(r"PeerError.*process 1\b", 0)
    time.sleep(2)
    assert job.is_running, job.text()
    os.kill(job.pid, signal.SIGTERM)
    told = time.monotonic()
    job.wait()
    assert time.monotonic() - told < TERM_WITHIN_S, job.text()
    assert job.first(None, r"process 0 .*: killed by SIGTERM"), job.text()
