"""`jaxhet.start` and `jaxhet.finish` between two islands, one of which computes without FMA."""

import pytest
from two_islands import SET_UP

from tests.support.scripts import job, run

HANDLES = """
import hashlib
mesh = jaxhet.make_mesh({"x": 2, "y": -1})
draw = np.random.default_rng(7)
SHAPES = {"a": (2, 64, 96), "b": (2, 70), "c": (2,)}
DTYPES = {"a": np.float32, "b": jnp.bfloat16, "c": np.float32}
ROUNDS = [{k: draw.standard_normal(s).astype(DTYPES[k]) for k, s in SHAPES.items()}
          for _ in range(6)]
SPECS = {"a": P("x", "y"), "b": P("x"), "c": P("x")}
def put(tree):
    return {k: jax.make_array_from_callback(x.shape, NamedSharding(mesh, SPECS[k]),
                                            lambda i, x=x: x[i]) for k, x in tree.items()}
def pieces(tree): return [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
def error_of(tree, whole, scale=0.5):
    return max(float(np.abs(np.asarray(s.data, np.float32) - np.asarray(
        w.astype(np.float32).sum(0) * scale)[s.index]).max()) for k, w in whole.items()
        for s in tree[k].addressable_shards)
def caught(word, f):
    try: jax.block_until_ready(f())
    except Exception as error: print("caught", word, word in str(error), str(error)[:400])
with jax.set_mesh(mesh):
    finish = jaxhet.jit(jaxhet.finish)
    for wire, bound in (("", 0.01), ("bf16", 0.02), ("mxfp8", 0.3), ("mxint8", 0.05),
                        ("mxint4", 0.6)):
        start = jaxhet.jit(lambda t: jaxhet.start(t, "x", name="f", wire=wire), donate_argnums=0)
        whole = ROUNDS[0]
        given = put(whole)
        handle = start(given)
        jax.block_until_ready(handle)
        del given
        again = put(ROUNDS[1])  # likely where the donated arrays were
        mean = finish(handle)
        digest = hashlib.sha256(b"".join(np.asarray(s.data).tobytes() for s in pieces(mean)))
        print("mean", wire or "f32", error_of(mean, whole) < bound, digest.hexdigest())
    summed = jaxhet.jit(lambda t: jaxhet.start(t, "x", name="s", op="sum"))
    print("sum", error_of(finish(summed(put(ROUNDS[2]))), ROUNDS[2], 1.0) < 0.02)
    # Two names in flight, finished the other way round, in one program with the next start.
    first = jaxhet.jit(lambda t: jaxhet.start(t, "x", name="one"))
    second = jaxhet.jit(lambda t: jaxhet.start(t, "x", name="two"))
    @jaxhet.jit
    def both(two, one, t):
        found = jaxhet.finish(two), jaxhet.finish(one)
        return found, jaxhet.start(t, "x", name="one")
    one, two = first(put(ROUNDS[0])), second(put(ROUNDS[1]))
    (b, a), one = both(two, one, put(ROUNDS[2]))
    c = finish(one)
    print("order", [error_of(x, w) < 0.01 for x, w in zip((a, b, c), ROUNDS)])
    caught("restore that in a new job", lambda: finish(one))
    given = put(ROUNDS[3])
    if me: time.sleep(2)  # the start of the other island does not wait
    before = time.monotonic()
    held = jax.block_until_ready(first(given))
    print("waited", time.monotonic() - before > 1.5)
    caught("was never finished", lambda: first(put(ROUNDS[4])))
    stale = jax.tree.map(lambda x: x + 1, held)
    caught("not the handle of the latest", lambda: finish(stale))
    # A handle as from a checkpoint of another job: this job has not started it.
    restored = jaxhet.Handle(held.parts, "x", "mean", "restored", "", held.leaves, held.structure)
    print("restored", error_of(finish(restored), ROUNDS[3]) < 0.01)
    print("held", error_of(finish(held), ROUNDS[3]) < 0.01)
    # An axis inside an island.
    inner = {"a": ROUNDS[0]["a"]}
    local = jaxhet.jit(lambda t: jaxhet.start(t, "y", name="local"))
    found = finish(local({"a": jax.make_array_from_callback(
        (2, 64, 96), NamedSharding(mesh, P("y")), lambda i: inner["a"][i])}))
    print("local", error_of(found, inner) < 1e-6)
    for bad in (dict(name="a b"), dict(op="max"), dict(wire="mxint9")):
        try: jaxhet.start({"a": ROUNDS[0]["a"]}, "x", **bad)
        except jaxhet.UsageError as error: print("caught usage", "letters, digits" in str(error))
    try: jaxhet.start({"a": np.ones((2, 3), np.int32)}, "x")
    except jaxhet.UsageError as error: print("caught usage", "give floats" in str(error))
    caught("has no derivative", lambda: jax.grad(
        lambda t: jaxhet.finish(jaxhet.start(t, "x"))["c"].sum())(ROUNDS[0]))
    with jax.set_mesh(jaxhet.make_mesh({"x": -1})):
        caught("as many as at its start", lambda: finish(restored))
    lost = jaxhet.jit(lambda t: jaxhet.start(t, "x", name="lost"))(put(ROUNDS[5]))
    jax.block_until_ready(lost)
    print("asked", jaxhet.plan(finish, lost).exchanges[0].collective)
jaxhet.shutdown()
"""


@pytest.mark.timeout(240)
def test_handles_outlive_programs() -> None:
    environments = job(2, JAX_NUM_CPU_DEVICES="2")
    environments[1]["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX"
    ended = run(SET_UP + HANDLES, *environments, timeout_s=220)
    for e in ended:
        lines = e.text.splitlines()
        assert e.code == 0, e.text
        assert [" ".join(x.split()[:3]) for x in lines if x.startswith("mean")] == [
            "mean f32 True",
            "mean bf16 True",
            "mean mxfp8 True",
            "mean mxint8 True",
            "mean mxint4 True",
        ], e.text
        for line in (
            "waited False",
            "sum True",
            "order [True, True, True]",
            "caught restore that in a new job True",
            "caught was never finished True",
            "caught not the handle of the latest True",
            "caught has no derivative True",
            "caught as many as at its start True",
            "restored True",
            "held True",
            "local True",
            "asked finish lost_0",
            "was started and never finished, as were 2 more: its data is lost, unless a checkpoint",
        ):
            assert line in e.text, (line, e.text)
        assert e.text.count("caught usage True") == 4, e.text
    digests = [[x for x in e.text.splitlines() if x.startswith("mean")] for e in ended]
    assert digests[0] == digests[1]


UNEQUAL = """
mesh = jaxhet.make_mesh({"x": 2})
def put(seed):
    whole = np.random.default_rng(seed).standard_normal((2, 300)).astype(np.float32)
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")),
                                        lambda i: whole[i])
def attempt(f):
    try: jax.block_until_ready(f())
    except jaxhet.JaxhetError as error: print("caught", type(error).__name__, error, flush=True)
with jax.set_mesh(mesh):
    start = {n: jaxhet.jit(lambda t, n=n: jaxhet.start(t, "x", name=n)) for n in "fg"}
    finish, case, before = jaxhet.jit(jaxhet.finish), os.environ["CASE"], time.monotonic()
    held = start["f"](put(1))
    other = start["g"](put(2)) if case == "another" else jax.tree.map(lambda x: x + 1, held)
    if case == "finished":
        attempt(lambda: finish(held))
        other = held
    again = lambda: start["f"](put(3)) if case == "finished" else held
    attempt(lambda: finish(other if me else again()))
    attempt(lambda: over_islands(psum)(x))
print("seconds", time.monotonic() - before)
jaxhet.last_error() or jaxhet.shutdown()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another", ("finish f_0", "finish g_0")),
        ("changed", ("not the handle of the latest",)),
        ("finished", ("was finished before",)),
    ],
)
def test_handles_that_differ_between_islands_are_errors_at_once(
    case: str, words: tuple[str, ...]
) -> None:
    ended = run(SET_UP + UNEQUAL, *job(2, CASE=case, JAXHET_DEADLINE_S="60"), timeout_s=55)
    for e in ended:
        assert "caught PlanMismatchError" in e.text or "caught PeerError" in e.text, e.text
        seconds = [line.split()[1] for line in e.text.splitlines() if line.startswith("seconds")]
        assert float(seconds[0]) < 30, e.text
    assert all(word in ended[1].text for word in words), ended[1].text
