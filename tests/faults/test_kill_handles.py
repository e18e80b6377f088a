"""A process is killed while an exchange of `jaxhet.start` is under way, at random moments.

`KILLS=200 pytest -m "slow or not slow" tests/faults/test_kill_handles.py` kills more often.
"""

import os
import random
import signal
import time

import pytest
from watched import WatchedJob, assert_others_report

from tests.multiprocess.two_islands import SET_UP

_PROGRAM = """
def rows(step): return put(np.repeat([[np.float32(step)], [np.float32(2 * step)]], 1 << 20, 1))
with jax.set_mesh(mesh):
    start = jaxhet.jit(lambda x: jaxhet.start(x, "x"), donate_argnums=0)
    finish = jaxhet.jit(jaxhet.finish)
    total = jaxhet.jit(lambda x: x.sum())
    for step in range(100000):
        handle = start(rows(step))
        for _ in range(2):
            found = np.asarray(total(rows(step)).addressable_data(0))
            if found != step * 3.0 * (1 << 20): print("WRONG", found, flush=True)
        mean = np.asarray(finish(handle).addressable_data(0))
        if not (mean == step * 1.5).all(): print("WRONG", mean, flush=True)
        if step == 3: print("@ under way", os.getpid(), flush=True)
"""
_KILLS = int(os.environ.get("KILLS", "20"))
_REPORT_WITHIN_S = 10.0
_random = random.Random(41)
_MOMENTS = [(i % 2, round(_random.uniform(0, 0.3), 4)) for i in range(_KILLS)]


@pytest.mark.parametrize(
    ("victim", "delay_s"),
    [
        pytest.param(*moment, marks=[pytest.mark.slow] if i else [], id=str(i))
        for i, moment in enumerate(_MOMENTS)
    ],
)
def test_kill_between_start_and_finish(victim: int, delay_s: float) -> None:
    job = WatchedJob(["-c", SET_UP + _PROGRAM], islands=2)
    pid = int(job.wait_for(r"@ under way (\d+)", victim)[1])
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait() == 128 + signal.SIGKILL, job.text()
    assert_others_report(job, victim, 2, killed - 0.1, _REPORT_WITHIN_S)
    assert "WRONG" not in job.text()
