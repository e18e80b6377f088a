"""Threads: one of them calls programs with exchanges, and any of them all other programs."""

from two_islands import run_both, told

TOOLS = """
import threading
KINDS = {
    "jaxhet.jit": lambda: over_islands(psum),
    "jax.jit": lambda: over_islands(psum, jax.jit),
    "ahead of time": lambda: over_islands(psum, jax.jit).lower(x).compile(),
    "jaxhet, ahead of time": lambda: over_islands(psum).lower(x).compile(),
}
functions = {kind: make() for kind, make in KINDS.items()}

def filled(value): return put(ones * value)

def call(kind, value=1.0):
    # Outcome of one call: "right", "wrong", or an error.
    try:
        got = np.asarray(functions[kind](filled(value)).addressable_data(0))
    except Exception as e:
        return f"{type(e).__module__}.{type(e).__name__}: {e}"
    return "right" if np.all(got == mesh.size * value) else f"wrong: {got}"

def in_thread(name, body):
    told = []
    thread = threading.Thread(target=lambda: told.append(body()), name=name)
    thread.start()
    return thread, told

def calls(value=1.0, count=3):
    return {kind: sorted({call(kind, value) for _ in range(count)}) for kind in functions}
"""


def assert_refused(calls: dict[str, list[str]], thread: str, launcher: str) -> None:
    """Checks that every kind of function was refused, each time with the same words."""
    for kind, outcomes in calls.items():
        (error,) = outcomes
        assert error.startswith("jaxhet.UsageError: jit("), (kind, error)
        assert f"was called by thread '{thread}'" in error
        assert f"in this process '{launcher}' calls such programs" in error
        assert "jaxhet.launch_from_this_thread()" in error


def test_threads_are_refused_and_the_main_thread_goes_on() -> None:
    """With programs of the main thread, in their first calls, and with a loaded executable."""
    script = """
from jax.experimental import serialize_executable
first = calls(count=5)
names = {"left": 1.0, "right": 100.0}
started = {n: in_thread(n, lambda v=v: calls(v, 100)) for n, v in names.items()}
for thread, _ in started.values(): thread.join()
def body():
    functions.update({f"new {kind}": make() for kind, make in KINDS.items()})
    functions["eager"] = jnp.sum
    return calls()
thread, new = in_thread("new", body)
thread.join()
jnp.sum(x)
functions.pop("eager")
last = calls(count=5)
compiled = over_islands(psum, jax.jit).lower(x).compile()
again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
functions = {"deserialized": again}
deserialized = calls()
thread, loaded = in_thread("loaded", calls)
thread.join()
tell(first=first, last=last, deserialized=deserialized, error=repr(jaxhet.last_error()),
     refused={"new": new[0], "loaded": loaded[0]} | {n: r[0] for n, (_, r) in started.items()})
"""
    for island in told(run_both(TOOLS + script)):
        assert len(island["refused"]["new"]) == 9
        for name, outcomes in island["refused"].items():
            assert_refused(outcomes, name, "MainThread")
        assert island["error"] == "None"  # the job is well
        for kinds in (island["first"], island["last"], island["deserialized"]):
            assert set(map(tuple, kinds.values())) == {("right",)}


def test_thread_that_owns_launches_calls_and_all_others_are_refused() -> None:
    script = """
first = calls(count=5)
has_started, go_on = threading.Event(), threading.Event()
def body():
    jaxhet.launch_from_this_thread()
    before = calls(count=5)
    has_started.set(); go_on.wait()
    return before, calls(7.0, count=5)
thread, results = in_thread("claimer", body)
has_started.wait()
refused = calls(100.0, count=5)
go_on.set(); thread.join()
thread, later = in_thread("later", calls)  # the system gives it the identity of the ended one
thread.join()
ended = calls()
jaxhet.launch_from_this_thread()
tell(first=first, claimer=results[0], refused=refused, later=later[0], ended=ended,
     again=calls(count=5))
"""
    for island in told(run_both(TOOLS + script)):
        right = [island["first"], *island["claimer"], island["again"]]
        for kinds in right:
            assert set(map(tuple, kinds.values())) == {("right",)}, kinds
        assert_refused(island["refused"], "MainThread", "claimer")
        assert_refused(island["later"], "later", "claimer")
        assert_refused(island["ended"], "MainThread", "claimer")


def test_any_thread_synchronizes_in_any_order_with_exchanges() -> None:
    script = """
from jax.experimental import multihost_utils
def sync(name):
    for _ in range(3): multihost_utils.sync_global_devices(name)
multihost_utils.sync_global_devices("alone")
ends = []
for turn in range(4):  # each island starts its sum before, or after, the threads meet
    threads = [in_thread(n, lambda n=n: sync(n)) for n in ("a", "b")[:: 1 - 2 * me]]
    if (turn + me) % 2: time.sleep(0.5)
    ends.append(call("jaxhet.jit", turn + 1.0))
    for thread, _ in threads: thread.join()
time.sleep(me)
begin = time.time()
multihost_utils.sync_global_devices("late")
tell(ends=ends, begin=begin, end=time.time())
"""
    islands = told(run_both(TOOLS + script))
    assert [island["ends"] for island in islands] == [["right"] * 4] * 2
    assert min(i["end"] for i in islands) >= max(i["begin"] for i in islands)


def test_a_process_that_does_not_synchronize_is_named() -> None:
    script = """
from jax.experimental import multihost_utils
def error():
    try: return str(multihost_utils.sync_global_devices(f"of {me}"))
    except (AssertionError, jaxhet.DeadlineError) as e: return str(e)
own = error()
thread, others = in_thread("other", error)
thread.join()
tell(own=own, others=others[0])
"""
    for island in told(run_both(TOOLS + script, JAXHET_DEADLINE_S="0.5")):
        assert island["own"].startswith("sync_global_devices name mismatch ('of ")
        assert " has not called sync_global_devices('of " in island["others"]


# In each process: jit on one device, eager operations, and a program with a sum over the devices of
# one island, which has no exchanges.
LOCAL = """
import time
from jax._src.interpreters import pxla
from jax.sharding import Mesh
own = Mesh(np.array(jax.local_devices()), ("y",))
row = jax.device_put(np.ones((own.size, 6), np.float32), NamedSharding(own, P("y")))
square = jax.jit(lambda a: a * a + 1)
ahead = jax.jit(lambda a: a - 1).lower(np.ones(6, np.float32)).compile()
inside = jax.jit(jax.shard_map(
    lambda a: jax.lax.psum(a, "y"), mesh=own, in_specs=P("y"), out_specs=P(), check_vma=False))

def local(value):
    a = np.full(6, value, np.float32)
    results = square(a), ahead(a), jnp.sum(jnp.asarray(a)) + 1, inside(row * value)
    expected = value**2 + 1, value - 1, 6 * value + 1, own.size * value
    return all(np.all(np.asarray(r) == e) for r, e in zip(results, expected))
"""


def test_programs_without_exchanges_are_never_refused_and_loops_start_hundreds_of_runs() -> None:
    script = (
        LOCAL
        + """
def body(value):
    try: return [local(value) for _ in range(100)]
    except Exception as e: return repr(e)
before = local(2.0), body(3.0)
threads = [in_thread(f"{v}", lambda v=v: body(v)) for v in (1.0, 4.0)]
mine = calls(count=50)
for thread, _ in threads: thread.join()
def mean(a):
    for _ in range(4): a = jnp.tanh(psum(a) / mesh.size) * 0 + 1.0
    return a
step = jaxhet.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
total = x
for _ in range(400): total = step(total)
total = float(jaxhet.block_until_ready(total).addressable_data(0)[0, 0])
tell(before=before, threads=[results[0] for _, results in threads], mine=mine, total=total,
     devices=mesh.size)
"""
    )
    for island in told(run_both(TOOLS + script, JAXHET_CPU_DEVICES="2")):
        assert (island["total"], island["devices"]) == (1.0, 4)
        assert island["before"] == [True, [True] * 100]
        assert island["threads"] == [[True] * 100] * 2
        assert set(map(tuple, island["mine"].values())) == {("right",)}


def test_programs_without_exchanges_take_the_fast_path_in_every_thread() -> None:
    """After its first calls a program is launched in C++, and none of jaxhet's Python runs."""
    script = (
        LOCAL
        + """
slow, launch = [], pxla.ExecuteReplicated.__call__
def counted(self, *args):
    slow.append(self.name)
    return launch(self, *args)
pxla.ExecuteReplicated.__call__ = counted

def body():
    a = jnp.ones(6)
    total = a
    for _ in range(20): total = square(a)
    del slow[:]
    ready.wait()
    start = time.perf_counter()
    for _ in range(2000): total = square(a)
    total.block_until_ready()
    us = (time.perf_counter() - start) / 2000 * 1e6
    return float(total[0]), us
calls()
ready = threading.Barrier(2)
threads = [in_thread(f"{i}", body) for i in range(2)]
for thread, _ in threads: thread.join()
tell(threads=[results[0] for _, results in threads], slow=slow)
"""
    )
    for island in told(run_both(TOOLS + script)):
        print("us per call in two threads:", [round(us, 1) for _, us in island["threads"]])
        assert [value for value, _ in island["threads"]] == [2.0, 2.0]
        assert not [name for name in island["slow"] if "lambda" in name], island["slow"]
        assert len(island["slow"]) < 20
        assert all(us < 1000 for _, us in island["threads"])
