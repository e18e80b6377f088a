"""How failures of a program reach its author."""

import pytest
from two_islands import run_both, told


def test_wrong_programs_and_options_are_errors() -> None:
    body = """
n = jnp.ones(2, jnp.int32)
def ragged(a): return jax.lax.ragged_all_to_all(a[0], a[0], n, n, n, n, axis_name="x")
def refused(jit): return over_islands(ragged, jit)
ways = {
    "jax.jit": lambda: refused(jax.jit)(x),
    "jaxhet.jit": lambda: refused(jaxhet.jit)(x),
    "compile": lambda: refused(jax.jit).lower(x).compile(),
    "eager": lambda: refused(lambda f: f)(x),
}
for way, call in ways.items():
    try: print("number", call())
    except jaxhet.UsageError as e: print("caught:", way, e.__cause__, e)
for bridge in ({"deadline": 1.0}, {"deadline_s": 0}):
    try: over_islands(psum, bridge=bridge)
    except jaxhet.UsageError as e: print("caught:", e)
"""
    for ended in run_both(body):
        for way in ("jax.jit", "jaxhet.jit", "compile", "eager"):
            assert f"caught: {way} None ragged-all-to-all " in ended.text, ended.text
        assert ended.text.count("ragged-all-to-all can't cross islands") == 4
        assert "<string>" in ended.text  # the source file
        assert "number" not in ended.text
        assert "holds an unknown option; valid: deadline_s" in ended.text
        assert "must be above 0 seconds" in ended.text


@pytest.mark.parametrize("jit", ["jax.jit", pytest.param("jaxhet.jit", marks=pytest.mark.slow)])
def test_death_of_a_peer_arrives_through(jit: str) -> None:
    body = f"""
f = over_islands(psum, {jit})
f(x)
if me == 1: os.kill(os.getpid(), 9)
try:
    for _ in range(1000): jax.block_until_ready(f(x)); time.sleep(0.01)
except Exception as e:
    print("caught:", type(e).__module__, type(e).__name__, str(e).splitlines()[0])
    print("last:", type(jaxhet.last_error()).__name__, jaxhet.last_error())
try: f(x)
except Exception as e: print("again:", type(e).__name__)
"""
    ended, killed = run_both(body)
    assert killed.code == -9
    first = ended.text.split("caught: ")[1].splitlines()[0]
    if jit == "jax.jit":
        assert "jaxhet.PeerError: " in first, ended.text
    else:
        assert first.startswith("jaxhet PeerError"), ended.text
    assert "last: PeerError" in ended.text
    assert "process 1" in ended.text.split("last: ")[1]
    assert "again: " in ended.text


_WITHOUT_TEXT = "type('NoText', (Exception,), {'__str__': lambda self: 1 / 0})()"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("ValueError('no more data')", "ValueError: no more data"),
        (r"ValueError('no \udcff data')", r"ValueError: no \udcff data"),
        (_WITHOUT_TEXT, "NoText: <exception str() failed>"),
        ("ValueError('é' * 5_000_001)", "ValueError: éé"),
    ],
)
def test_uncaught_exception_is_what_the_others_are_told(error: str, told: str) -> None:
    body = f"""
f = over_islands(psum)
f(x)
if me == 1: raise {error}
try:
    for _ in range(1000): f(x); time.sleep(0.01)
except jaxhet.PeerError as e: print("caught:", str(e)[:200])
"""
    ended, failed = run_both(body)
    assert f"ended by an exception: {told}" in ended.text.split("caught:")[1]
    assert failed.code == 1


@pytest.mark.parametrize("ahead", ["", ".lower(x).compile()"], ids=["jit", "ahead of time"])
def test_deadline_of_one_function_names_who_is_late(ahead: str) -> None:
    body = f"""
f = over_islands(psum, bridge={{"deadline_s": 1.0}}){ahead}
f(x)
over_islands(psum)(x)  # the same program with the deadline of the job
if me == 1: time.sleep(3)
start = time.monotonic()
try: print("number", f(x))
except jaxhet.JaxhetError as e:
    print("caught:", type(e).__name__, 1 <= time.monotonic() - start < 3, e)
"""
    early, late = run_both(body)
    assert "caught: DeadlineError True" in early.text, early.text
    assert "process 1" in early.text.split("caught:")[1]
    assert "caught: DeadlineError" in late.text, late.text
    assert "number" not in early.text + late.text


_CALLBACK = """
def refuse(v):
    raise ValueError("too big")
    return v
def f(v):
    total = v.sum()
    return total, jax.pure_callback(refuse, jax.typeof(total), total)
try:
    jaxhet.block_until_ready(jaxhet.jit(f)(x))
except (RuntimeError, jaxhet.JaxhetError) as error:
    tell(error=str(error), last=str(jaxhet.last_error()))
"""


@pytest.mark.parametrize("devices", ["1", "2"])
def test_callback_that_raises_is_told_to_processes_that_wait_for_its_result(devices: str) -> None:
    """XLA calls it in process 0, whose program catches the error."""
    first, second = told(run_both(_CALLBACK, JAX_NUM_CPU_DEVICES=devices))
    failure = "process 0 (island0): a host callback raised ValueError: too big; "
    assert "too big" in first["error"]
    for text in (first["last"], second["error"], second["last"]):
        assert text.startswith(failure)


_ENDS_SLOWLY = """
import threading
f = over_islands(psum)
jaxhet.block_until_ready(f(x))
if me == 0:
    threading.Thread(target=time.sleep, args=(8,)).start()  # Python waits for it
    raise ValueError("no more data")
began = time.monotonic()
try:
    jaxhet.block_until_ready(f(x))
except jaxhet.PeerError as error:
    print("told", error, f"in {time.monotonic() - began < 4}", flush=True)
    raise
"""


def test_uncaught_exception_is_told_before_other_threads_end() -> None:
    first, second = run_both(_ENDS_SLOWLY)
    assert (first.code, second.code) == (1, 1), first.text + second.text
    assert "ended by an exception: ValueError: no more data; see there in True" in second.text
