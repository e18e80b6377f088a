"""`jaxhet.start` and `jaxhet.finish` between GPUs, beside other exchanges and a donated operand."""

import pytest

from tests.gpu.scripts_on_gpus import ON_BOTH, told

_SCRIPT = """
def rows(size, seed):
    whole = np.random.default_rng(seed).standard_normal((2, size)).astype(np.float32)
    return whole, put(whole)
with jax.set_mesh(mesh):
    start = jaxhet.jit(lambda x: jaxhet.start(x, "x", name="a"), donate_argnums=0)
    second = jaxhet.jit(lambda x: jaxhet.start(x, "x", name="b", wire="mxint8"))
    finish = jaxhet.jit(jaxhet.finish)
    step = jaxhet.jit(lambda x: jnp.tanh(x - x.mean(0)) + (x @ x.T).sum())
    right = True
    for size in (1000, 3 << 20):
        for number in range(6):
            whole, x = rows(size, number)
            _, y = rows(size, 9)
            one, two = start(x), second(y)
            for _ in range(3): y = step(y)
            mean, other = finish(one), finish(two)
            found = np.asarray(mean.addressable_data(0))
            right &= bool((found == whole.sum(0) / 2).all())
            right &= float(np.abs(np.asarray(other.addressable_data(0)) - rows(size, 9)[0].mean(0)
                                  ).max()) < 0.1
    print("right", right)
    kept = jaxhet.Handle(one.parts, "x", "mean", "kept", "", one.leaves, one.structure)
    found = np.asarray(finish(kept).addressable_data(0))
    print("restored", bool((found == whole.sum(0) / 2).all()))
    lost = second(rows(1000, 1)[1])
    jax.block_until_ready(lost)
print("stays", jax.tree.leaves(lost)[0].shape)
jaxhet.shutdown()
print("closed")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["", "host", "socket"])
@ON_BOTH
def test_handles_outlive_programs_on_gpus(platform: str, transport: str) -> None:
    if platform == "cpu" and transport == "host":
        pytest.skip("a transport of GPUs")
    env = {"JAXHET_TRANSPORTS": transport} if transport else {}
    both, job = told(platform, _SCRIPT, **env)
    for lines in both:
        assert {"right True", "restored True", "closed"} <= {*lines}, job.text()
        assert any("was started and never finished" in line for line in lines), job.text()
