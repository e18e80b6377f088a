"""The coordinator is killed or stopped: saves end, and every process names it and ends."""

import pathlib
import re

import pytest

from tests.support.scripts import ON_GPUS_TOO, Ended, job, on, run

_LOST = r"the job's coordinator at 127\.0\.0\.1:\d+ (is gone|has not answered)"

# Process 0 starts the coordinator and kills or stops it.
_START = """
import atexit, os, pathlib, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxhet
from jaxhet import _initialize

process = int(os.environ["JAXHET_PROCESS_ID"])

def hurt(number):
    coordinator = _initialize._sidecars[0]
    atexit.register(coordinator.wait)
    atexit.register(coordinator.kill)
    coordinator.send_signal(number)
"""

# Both processes save on a thread; process 1 waits in an exchange for process 0.
_SAVE = """
jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": 2})
sharding = NamedSharding(mesh, P("x"))
x = jax.make_array_from_callback((2,), sharding, lambda i: np.ones(1, np.float32))
specs = {"mesh": mesh, "in_specs": P("x"), "out_specs": P()}
step = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "x"), **specs))
step(x).block_until_ready()

def save():
    folder = pathlib.Path(os.environ["FOLDER"], str(process))
    folder.mkdir()
    with jaxhet.saving(folder):
        for i in range(45):
            (folder / str(i)).write_bytes(b"x")
            time.sleep(0.1)
        (folder / "COMPLETE").touch()

saver = threading.Thread(target=save)
saver.start()
if process == 0:
    time.sleep(1)
    hurt(signal.NUMBER)
    time.sleep(0.5)
    saver.join()
jaxhet.block_until_ready(step(x))
print("not told", flush=True)
"""

_SET_UP = """
if process == 1:
    time.sleep(3)
else:
    def hurt_later():
        while not _initialize._sidecars:
            time.sleep(0.01)
        time.sleep(1)
        hurt(signal.SIGKILL)
    threading.Thread(target=hurt_later).start()
jaxhet.initialize()
"""

_SHUTDOWN = """
jaxhet.initialize()
if process == 0:
    time.sleep(1)
    hurt(signal.SIGKILL)
    time.sleep(1)
jaxhet.shutdown()
"""

_ONE_ISLAND = """
jaxhet.initialize()
step = jaxhet.jit(lambda v: v + 1)
if process == 0:
    time.sleep(1)
    hurt(signal.SIGKILL)
for _ in range(200):
    step(jnp.ones(3)).block_until_ready()
    time.sleep(0.1)
"""


def _names_the_coordinator(ended: Ended) -> bool:
    return re.search(_LOST, ended.text) is not None


# One job has a proxy for other programs.
@ON_GPUS_TOO
@pytest.mark.parametrize("number", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_saves_end_and_the_error_names_the_coordinator(
    platform: str, number: str, tmp_path: pathlib.Path
) -> None:
    script = _START + _SAVE.replace("NUMBER", number)
    more = {} if number == "SIGKILL" else {"http_proxy": "http://127.0.0.1:1"}
    envs = job(2, FOLDER=str(tmp_path), JAXHET_PEER_TIMEOUT_S="2", **more)
    for process, ended in enumerate(run(script, *on(platform, envs))):
        assert ended.code == 1, ended.text
        assert _names_the_coordinator(ended), ended.text
        assert "not told" not in ended.text
        assert (tmp_path / str(process) / "COMPLETE").exists(), ended.text


def test_coordinator_killed_during_the_set_up_is_named() -> None:
    first, late = run(_START + _SET_UP, *job(JAXHET_CONNECT_TIMEOUT_S="4"))
    assert first.code == late.code == 1, first.text + late.text
    assert _names_the_coordinator(first), first.text
    assert "no coordinator answers on 127.0.0.1:" in late.text


def test_coordinator_killed_at_shutdown_aborts_nobody() -> None:
    first, waiting = run(_START + _SHUTDOWN, *job())
    assert first.code == 70, first.text
    assert _names_the_coordinator(first), first.text
    assert waiting.code in (0, 70), waiting.text


def test_job_of_one_island_names_a_killed_coordinator() -> None:
    envs = [{**env, "JAXHET_ISLAND": "all"} for env in job()]
    for ended in run(_START + _ONE_ISLAND, *envs):
        assert ended.code == 1, ended.text
        assert _names_the_coordinator(ended), ended.text
