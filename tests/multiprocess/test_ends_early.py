"""Programs that end as soon as they have one result, while other devices still exchange."""

import os
import pathlib

import pytest
from two_islands import SET_UP

from tests.support.scripts import ON_GPUS_TOO, job, on, run

_SCRIPT = """
mesh = jaxhet.make_mesh({"x": 2, "y": 2})

def late_by_compute(v):  # on the second device of the first island
    is_late = (jax.lax.axis_index("x") == 0) & (jax.lax.axis_index("y") == 1)
    sines = lambda _, v: jnp.sin(v)
    return jax.lax.fori_loop(0, jnp.where(is_late, 4_000_000, 0), sines, v)

def late_by_callback(v):
    def sleep(v):
        time.sleep(1 - jax.process_index())
        return v
    return jax.pure_callback(sleep, jax.typeof(v), v)

def one_reads(v):
    return jax.lax.psum(late_by_compute(v), "x")

def nobody_reads(v):
    v = jax.lax.psum(late_by_callback(v), "x")
    jax.debug.callback(lambda v: print(f"told {v.item()}\\\\n", end="", flush=True), v)
    return v

specs = {"in_specs": P("x", "y"), "out_specs": P(None, "y"), "check_vma": False}
step = jax.jit(jax.shard_map(PROGRAM, mesh=mesh, **specs))
result = step(put(np.ones((2, 2), np.float32), P("x", "y")))
if PROGRAM is one_reads:
    own = result.addressable_shards[jax.process_index()].data
    print("read", own.item(), flush=True)
    del own
del result
"""
_TWO_DEVICES = {"JAX_NUM_CPU_DEVICES": "2"}


def test_other_process_reads_what_the_late_device_sends() -> None:
    script = SET_UP + _SCRIPT.replace("PROGRAM", "one_reads")
    first, second = run(script, *job(2, **_TWO_DEVICES), timeout_s=120)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert "read 2.0" in first.text  # the device that was not late
    assert "read 1.0" in second.text


def test_callbacks_of_results_that_nobody_reads_are_told() -> None:
    script = SET_UP + _SCRIPT.replace("PROGRAM", "nobody_reads")
    for ended in run(script, *job(2, **_TWO_DEVICES), timeout_s=120):
        assert ended.code == 0, ended.text
        assert ended.text.count("told 2.0") == 2, ended.text


_HOOKS = """
import atexit, io, sys, threading, time
def upload():
    time.sleep(8)  # longer than any limit of this job
    print("uploaded", flush=True)
atexit.register(upload)

import jax, jaxhet
from jax.experimental import multihost_utils
jaxhet.initialize()
multihost_utils.sync_global_devices("both have joined")
class Tracker:
    def __del__(self):
        print("closed", flush=True)
tracker = Tracker()
class Stuck(io.RawIOBase):  # a pipe that nobody reads
    def flush(self):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1000)
stuck = Stuck()
if jax.process_index() == 1:
    raise ValueError("bad batch")
while jaxhet.last_error() is None:
    time.sleep(0.01)
sys.exit(42)
"""


@ON_GPUS_TOO
def test_exit_hooks_of_a_program_end_after_a_failure_and_its_exit_code_stays(
    platform: str,
) -> None:
    first, second = run(_HOOKS, *on(platform, job(JAXHET_EXIT_TIMEOUT_S="60")))
    assert (first.code, second.code) == (42, 1), first.text + second.text
    for ended in (first, second):
        assert "uploaded" in ended.text, ended.text
        assert "closed" in ended.text, ended.text
    assert "ValueError: bad batch" in second.text


_STUCK = """
import os, sys, threading, time
import jax, jaxhet
jaxhet.initialize()
file = open(os.environ["KEPT"], "w")
file.write("results")
print("printed")
if jax.process_index() == 1:
    raise ValueError("bad batch")
def sleep(x):
    time.sleep(1000)
    return x
class Tool:
    def __del__(self):
        time.sleep(1000)
if os.environ["STUCK"] == "device":
    jax.jit(lambda x: jax.pure_callback(sleep, jax.typeof(x), x))(1.0)
if os.environ["STUCK"] == "destructor":
    _tool = Tool()  # Python clears private names first
while os.environ["STUCK"] == "loop" or jaxhet.last_error() is None:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("where", ["device", "loop", "destructor"])
def test_program_that_is_ended_after_a_failure_loses_nothing_that_its_files_hold(
    where: str, tmp_path: pathlib.Path
) -> None:
    """A device never ends its work, the program ignores the failure, or Python does not end."""
    kept = tmp_path / "kept"
    envs = job(JAXHET_EXIT_TIMEOUT_S="20", KEPT=str(kept), STUCK=where)
    stuck, _ = run(_STUCK, envs[0], {**envs[1], "KEPT": os.devnull}, timeout_s=60)
    assert stuck.code == 70, stuck.text
    assert "(JAXHET_EXIT_TIMEOUT_S)" in stuck.text
    assert "printed" in stuck.text
    assert "ignored in atexit" not in stuck.text
    assert kept.read_text() == "results"


_WAITS = """
import sys, threading, time
import jax, jaxhet
from jax._src import distributed
jaxhet.initialize()
if jax.process_index() == 1:
    time.sleep(1)
    raise ValueError("bad batch")
wait = lambda: distributed.global_state.client.wait_at_barrier("checkpoint", 100_000)
threading.Thread(target=wait).start()
while jaxhet.last_error() is None:
    time.sleep(0.01)
sys.exit(42)
"""


def test_waits_at_barriers_end_after_a_failure() -> None:
    first, _ = run(_WAITS, *job(), timeout_s=60)
    assert first.code == 42, first.text
    assert "CANCELLED" in first.text


_WAITS_IN_AN_EXIT_HOOK = """
import atexit, os, signal, time
import jax, jaxhet
from jax._src import distributed
jaxhet.initialize()
if jax.process_index() == 1:
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
wait = lambda: distributed.global_state.client.wait_at_barrier("checkpoint", 100_000)
atexit.register(wait)
"""


def test_waits_of_exit_hooks_end_after_a_failure_where_traces_are_written(
    tmp_path: pathlib.Path,
) -> None:
    first, _ = run(_WAITS_IN_AN_EXIT_HOOK, *job(JAXHET_TRACE_FOLDER=str(tmp_path)), timeout_s=60)
    assert "CANCELLED" in first.text
    assert [path.name for path in tmp_path.iterdir()] == ["jaxhet-0.trace.json"]


_CALLBACKS_OF_A_FAILED_PROGRAM = """
def told(v):
    total = jax.lax.psum(v, "x")
    jax.debug.callback(lambda t: None, total)
    return total
f = over_islands(told)
jax.block_until_ready(f(x))
if me == 1:
    jax.block_until_ready(f(x))
"""


def test_exit_hooks_do_not_raise_the_error_of_a_failed_program_again() -> None:
    script = SET_UP + _CALLBACKS_OF_A_FAILED_PROGRAM
    _, second = run(script, *job(2, **_TWO_DEVICES))
    assert second.code == 1, second.text
    assert "process 0 (island0, " in second.text
    assert "ignored in atexit" not in second.text
