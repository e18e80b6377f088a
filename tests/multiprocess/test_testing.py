"""`jaxhet.testing`: the guide's example runs, and errors carry the output of the processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import jaxhet
from jaxhet import testing
from tests.support import schemas
from tests.support.waiting import is_running, wait_until


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": testing.import_path(), "JAX_PLATFORMS": "cpu"}


def fail(text: str) -> None:
    """Called in the processes of a job."""
    raise ValueError(text)


def test_error_of_a_process_is_in_the_message():
    with pytest.raises(AssertionError, match=r"a process ended:(.|\n)*ValueError: no such thing"):
        testing.run_in_one_world(fail, 1, "no such thing")


def test_job_whose_process_ends_before_it_is_ready_does_not_start(tmp_path: pathlib.Path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit('no licence')")
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ended before it was ready:(.|\n)*no licence"):
        testing.island_job(testing.Shape(2), worker)
    assert time.monotonic() - start < testing._START_TIMEOUT_S / 2


def test_job_whose_user_raises_is_ended():
    job = testing.world_job(1)

    def use() -> None:
        with job:
            assert job.ask((os.getppid, ())) == [os.getpid()]
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert job.is_broken
    assert not job.log.exists()


def test_process_that_died_after_its_last_answer_is_in_the_message():
    job = testing.island_job(testing.Shape(2))
    pid = job.ask((os.getpid, ()))[1]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), 30)
    with pytest.raises(AssertionError, match="the job ended with"):
        job.close()


_OWNER = """
import os, time
from jaxhet import testing
with testing.island_job(testing.Shape(2, 1, 1)) as job:
    print(*job.ask((os.getpid, ())), flush=True)
    job.ask((time.sleep, (600,)), 600)
"""


def test_processes_end_when_their_owner_is_killed_while_they_work():
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    wait_until(lambda: not any(map(is_running, pids)), 60)


def test_import_path_has_folders_of_this_process_and_no_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", ["", "/somewhere", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/given")
    folders = testing.import_path().split(os.pathsep)
    assert [folders[0], folders[1], folders[-1]] == [os.getcwd(), "/somewhere", "/given"]
    assert not [folder for folder in folders if "site-packages" in folder]


def count() -> dict[str, float]:
    """Statistics of a job after an exchange; called in its processes."""
    import jax
    import jax.numpy as jnp

    mesh = jaxhet.make_mesh({"x": -1})
    x = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P("x")))
    jax.block_until_ready(jax.jit(jnp.sum)(x))
    return jaxhet.stats()


def test_stats_keep_their_schema():
    for stats in testing.run_on_islands(count, testing.Shape(2)):
        schemas.check("stats", stats)
        assert stats["exchanges_completed"] >= 1
