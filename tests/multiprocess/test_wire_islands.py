"""Compressed exchanges in a job of two islands, of which one computes without FMA."""

import pytest
from two_islands import SET_UP

from tests.support.scripts import job, run

TRAIN = """
STEPS = int(os.environ["STEPS"])
rows = np.random.default_rng(me).standard_normal((8, 520)).astype(np.float32)
shape, split = (8 * mesh.size, 520), NamedSharding(mesh, P("x"))
rows = jax.make_array_from_callback(shape, split, lambda i: rows)
start = np.random.default_rng(9).standard_normal((520, 520)).astype(np.float32) / 32
start = jax.make_array_from_callback(start.shape, NamedSharding(mesh, P()), lambda i: start)

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
        assert "all_gather all-reduce sum hierarchical bf16 u16[270400]" in e.text  # in words
        assert "all_gather all-reduce sum hierarchical mxint8/32 u8[278850]" in e.text
