"""Threads that register plans and compile programs while the job is shut down."""

import pytest

from tests.support.scripts import job, run

_SCRIPT = """
import threading, time
import jax, jax.numpy as jnp, jaxhet
from jax.sharding import PartitionSpec as P
from jaxhet import _session

jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": -1})
engine = _session.required().engine
told = []

def register():
    i = 0
    while True:
        engine.register_plan(i % 8, "x", "")
        i += 1

def compile():
    i = 1
    while True:
        step = jax.shard_map(lambda a: jax.lax.psum(a * i, "x"), mesh=mesh, in_specs=P("x"),
                             out_specs=P())
        jaxhet.jit(step).lower(jax.ShapeDtypeStruct((jax.device_count(),), jnp.float32)).compile()
        i += 1

def until_told(action):
    try:
        action()
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")

threads = [threading.Thread(target=until_told, args=(action,))
           for action in (register, register, register, compile)]
for thread in threads:
    thread.start()
time.sleep(DELAY)
jaxhet.shutdown()
for thread in threads:
    thread.join(30)
    assert not thread.is_alive()
print("told", *sorted(told), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 2.0])
def test_threads_that_register_and_compile_are_told_of_the_end(delay_s: float) -> None:
    for ended in run(_SCRIPT.replace("DELAY", str(delay_s)), *job(2), timeout_s=120):
        assert ended.code == 0, ended.text
        assert ended.text.count("jaxhet is shut down") >= 3, ended.text
