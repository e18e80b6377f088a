"""Compressed exchanges in a job of two islands. One of them computes without FMA."""

import pathlib

import pytest
from two_islands import SET_UP

from jaxhet.testing import FAST_COMPILE
from models.extras.records import compare_replicas, read_rows
from tests.support.scripts import job, run

TRAIN = """
STEPS = int(os.environ["STEPS"])
drawn = lambda seed, rows: np.random.default_rng(seed).standard_normal((rows, 520), np.float32)
rows, start = put(drawn(1, 8 * mesh.size)), put(drawn(9, 520) / 32, P())

def step(w, rows):
    gradient = jax.grad(lambda w: jnp.mean(jnp.sin(jnp.tanh(rows @ w) @ w.T) ** 2))(w)
    return w - jax.lax.psum(gradient, "x") * 0.5  # an exact product: equal with FMA and without

def trained(**bridge):
    body = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    f, w = jaxhet.jit(body, bridge=bridge), start
    for _ in range(STEPS): w = f(w, rows)
    return np.asarray(w.addressable_data(0)), f

import hashlib
plain, f = trained()
print("plan", "mxint8" in str(jaxhet.plan(f, start, rows)))
for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
    w, f = trained(wire={"x": codec})
    print(codec, hashlib.sha256(w.tobytes()).hexdigest(), float(np.abs(w - plain).max()) > 0)
    print(jaxhet.plan(f, start, rows))
print("all", "mxint4/32" in str(jaxhet.plan(jaxhet.jit(f, bridge={"wire": "mxint4"}), start, rows)))
try: trained(wire="mxint9")
except jaxhet.UsageError as error: print("caught:", error)
try: trained(wire=("bf16", "mxint8")[me])
except jaxhet.PlanMismatchError as error: print("caught:", error)
"""

# FSDP, and arrays sent there and back: sums over all steps of what each island has. A decoded array
# crosses again unchanged, so the sender learns what the receiver got.
OTHERS = """
STEPS = int(os.environ["STEPS"])
drawn = lambda seed, rows: np.random.default_rng(seed).standard_normal((rows, 520), np.float32)
rows, start = put(drawn(1, 8 * mesh.size)), put(drawn(9, 520 * mesh.size) / 32)
SWAP = [(0, 1), (1, 0)]
def bits(x): return jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32))

def fsdp(shard, rows, total):
    w = jax.lax.all_gather(shard, "x", tiled=True)
    gradient = jax.grad(lambda w: jnp.mean(jnp.sin(jnp.tanh(rows @ w.T) @ w) ** 2))(w)
    shard = shard - jax.lax.psum_scatter(gradient, "x", tiled=True)
    return shard, rows, total * 3 + bits(w)

def swap(own, rows, total):
    received = jax.lax.ppermute(own, "x", SWAP)
    returned = jax.lax.ppermute(received, "x", SWAP)
    totals = jnp.stack([bits(received), bits(returned)])
    return jnp.tanh(own + received * jnp.float32(0.9)), rows, total * 3 + totals[None]

for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
    for step, shape, spec in ((fsdp, (), P()), (swap, (mesh.size, 2), P("x"))):
        specs = (P("x"), P("x"), spec)
        body = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        f = jaxhet.jit(body, bridge={"wire": {"x": codec}})
        state = start, rows, put(np.zeros(shape, np.uint32), spec)
        exchanges = jaxhet.plan(f, *state).exchanges
        kinds = sorted({e.collective.split()[0] for e in exchanges if e.wire.startswith(codec)})
        for _ in range(STEPS): state = f(*state)
        print("total", codec, step.__name__, *np.asarray(state[2].addressable_data(0)).flatten())
        print("kinds", *kinds, flush=True)
"""

OPTIM = """
import hashlib, optax
from jax.experimental import multihost_utils
from jaxhet import optim
default, optim.LEAST_BYTES = optim.LEAST_BYTES, 1  # the smallest leaves are compressed, too
large = np.random.default_rng(me).standard_normal((1, 600, 600)).astype(np.float32)
whole = np.concatenate([np.random.default_rng(i).standard_normal((1, 600, 600)) for i in (0, 1)])
whole = whole.astype(np.float32)
x = put(whole)
back = jax.sharding.Mesh(mesh.devices[::-1], "x")
y = jax.device_put(x, NamedSharding(back, P("x"))).addressable_data(0)
z = jax.device_put(whole, NamedSharding(mesh, P())).addressable_data(0)
gathered = multihost_utils.process_allgather(large[0], tiled=False)
unlike = jax.make_array_from_single_device_arrays(
    large.shape, NamedSharding(mesh, P()), [jax.device_put(large, jax.local_devices()[0])])
synced = jaxhet.sync_replicas(unlike).addressable_data(0)
other = over_islands(lambda a: jax.lax.psum(a, "x"), jax.jit)(x).addressable_data(0)[0]
print("exact", np.array_equal(y[0], whole[1 - me]), np.array_equal(z, whole),
      np.array_equal(gathered, whole), np.array_equal(synced, whole[:1]),
      np.array_equal(multihost_utils.broadcast_one_to_all(large), whole[:1]),
      np.array_equal(multihost_utils.process_allgather(x, tiled=True), whole),
      np.array_equal(other, whole.sum(0)))
draw = np.random.default_rng(5)
batch = draw.standard_normal((2, 8, 96)).astype(np.float32)
params = {"w": draw.standard_normal((96, 40)).astype(np.float32), "b": np.zeros((7,), np.float32)}
def loss(params, x):
    b = params["b"]
    return jnp.mean(jnp.sin(x @ params["w"]) ** 2) + jnp.sum(b**2 + b * x[0, 0])
def first(tree): return [np.asarray(x.addressable_data(0)).tobytes() for x in jax.tree.leaves(tree)]
def digest(tree): return hashlib.sha256(b"".join(first(tree))).hexdigest()
with jax.set_mesh(mesh):
    for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
        tx = optim.error_feedback(optax.sgd(0.5), "x", codec)  # an exact product, as above
        @jaxhet.jit
        def step(p, state):
            own = jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name="x")(p, batch)
            updates, state = tx.update(own, state, p)
            return optax.apply_updates(p, updates), state
        p, state = params, jaxhet.jit(tx.init)(params)
        one = len(jaxhet.plan(step, p, state).exchanges) == 1
        for _ in range(20): p, state = step(p, state)
        print("feedback", codec, one, digest(p))
    optim.LEAST_BYTES = default
    zeros = {"w": np.zeros(whole.shape[1:], np.float32), "b": np.zeros(7, np.float32)}
    update = jaxhet.jit(lambda x, state: tx.update({"w": x, "b": x[:, 0, :7]}, state))
    state = jaxhet.jit(tx.init)(zeros)
    one = len(jaxhet.plan(update, x, state).exchanges) == 1
    updates = update(x, state)[0]
    small = (whole[0, 0, :7] + whole[1, 0, :7]) / 2 * np.float32(-0.5)
    is_exact = np.array_equal(updates["b"].addressable_data(0), small)
    print("feedback default", one and is_exact, digest(updates))
    for delay in (2, 0):
        tx = optim.diloco(optax.adam(1e-2), optax.sgd(0.5), "x", every=4, fragments=2, delay=delay,
                          wire="mxint4")
        @jaxhet.jit
        def step(p, state):
            own = jax.vmap(jax.grad(loss), spmd_axis_name="x")(p, batch)
            updates, state = tx.update(own, state, p)
            return optax.apply_updates(p, updates), state
        copies = jax.tree.map(lambda x: np.stack([x, x]), params)
        state = jaxhet.jit(tx.init)(copies)
        for _ in range(16): copies, state = step(copies, state)
        moved = np.abs(np.asarray(state.params["w"].addressable_data(0)) - params["w"]).max()
        print("diloco", delay, digest(state.params), moved > 1e-3)
    plan = jaxhet.plan(step, copies, state)
    print("plan", sorted({e.shapes for e in plan.exchanges}), {e.times for e in plan.exchanges})
"""


def test_optimizers_and_copies_with_an_option_for_all_exchanges() -> None:
    environments = job(2, JAXHET_WIRE="mxint8")
    environments[1]["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX"
    ended = run(SET_UP + OPTIM, *environments, timeout_s=200)
    lines = [
        [line for line in e.text.splitlines() if line.startswith(("feedback", "diloco", "plan"))]
        for e in ended
    ]
    assert len(lines[0]) == 8, ended[0].text
    assert all("True" in line for line in lines[0][:7]), lines
    for e in ended:  # copies are exact; only the program's own sum is compressed
        assert "exact True True True True True True False" in e.text, e.text
    assert lines[0] == lines[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_replicas_are_equal_to_the_bit_with_every_codec(steps: int) -> None:
    environments = job(2, STEPS=str(steps))
    environments[1]["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX"
    ended = run(SET_UP + TRAIN, *environments, timeout_s=280)
    digests = [[line for line in e.text.splitlines() if " True" in line] for e in ended]
    assert [line.split()[0] for line in digests[0]] == [
        "bf16",
        "mxfp8",
        "mxint8",
        "mxint4",
        "all",
    ], ended[0].text
    assert digests[0] == digests[1]
    for e in ended:
        assert "plan False" in e.text
        assert "278.9 kB for 1.1 MB, mxint8/32" in e.text
        assert "bridge wire='mxint9' is not valid; codecs: bf16, mxfp8, mxint8, mxint4" in e.text
        assert "permute all-reduce sum hierarchical bf16 u16[270400]" in e.text  # in words
        assert "permute all-reduce sum hierarchical mxint8/32 u8[278850]" in e.text


SHARDED = """
import os
from jaxhet.compiler import codecs
from models import pretrain
codecs.LEAST_BYTES = 1  # parameters of the smallest model are compressed, too
pretrain.main(["--config=tiny", "--batch=4", "--seq=16", "--mesh=data=2", "--update=sharded",
    "--steps=2", "--learning-rate=0", "--log-every=1", "--digest", "--wire=mxint8",
    "--run-dir=" + os.environ["FOLDER"]])
"""


def test_sharded_update_of_zero_leaves_the_bits_of_parameters(tmp_path: pathlib.Path) -> None:
    for ended in run(SHARDED, *job(2, FOLDER=str(tmp_path), **FAST_COMPILE), timeout_s=190):
        assert ended.code == 0, ended.text
    for process in range(2):
        rows = read_rows(tmp_path / f"digests-{process}.jsonl")
        assert {row["step"] for row in rows} == {0, 1, 2}
        assert len({str(sorted((row | {"step": 0}).items())) for row in rows}) == len(rows) // 3
    assert compare_replicas(tmp_path).equal


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_gathers_scattered_sums_and_permutes_are_equal_to_the_bit(steps: int) -> None:
    environments = job(2, STEPS=str(steps))
    environments[1]["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX"
    ended = run(SET_UP + OTHERS, *environments, timeout_s=280)
    lines = [[line.split() for line in e.text.splitlines()] for e in ended]
    kinds = [words[1:] for words in lines[0] if words[:1] == ["kinds"]]
    assert kinds == 4 * [["all-gather", "reduce-scatter"], ["collective-permute"]], ended[0].text
    first, second = ([words[1:] for words in own if words[:1] == ["total"]] for own in lines)
    assert len({tuple(totals) for _, _, *totals in first}) == 8, ended[0].text
    # Values that one island received are those that the other has returned.
    assert [[*words[:2], *reversed(words[2:])] for words in first] == second
