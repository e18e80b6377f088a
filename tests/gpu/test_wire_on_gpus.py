"""Codecs on GPUs: the bits of the reference, in sums over two islands and in `jaxhet.optim`."""

import pytest

from benchmarks import gpus
from tests.faults.watched import WatchedJob

_SCRIPT = """
import jax, numpy as np
import jaxhet
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxhet._microscaling import decode, encode
from tests.support import microscaling

jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": 2})
rows = [microscaling.drawn(i, (16, 1 << 16)).reshape(1, -1) for i in range(2)]
whole = np.concatenate(rows)
x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("x")), whole.__getitem__)
specs = {"mesh": mesh, "in_specs": P("x"), "out_specs": P(), "check_vma": False}
total = jax.shard_map(lambda v: jax.lax.psum(v, "x"), **specs)

def is_equal(found, right):
    numbers = ~np.isnan(right)
    same = found.view(np.uint32)[numbers] == right.view(np.uint32)[numbers]
    return same.all() and np.isnan(found[~numbers]).all()

for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
    found = np.asarray(jaxhet.jit(total, bridge={"wire": codec})(x).addressable_data(0))
    print("sum", codec, is_equal(found[0], microscaling.summed([r[0] for r in rows], codec)))
    back = jax.jit(lambda v, codec=codec: decode(encode(v, codec), codec, v.shape))(rows[0])
    print("optim", codec, is_equal(np.asarray(back)[0], microscaling.decoded(rows[0], codec)[0]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def test_codecs_have_the_bits_of_the_reference(platform: str) -> None:
    if platform == "cuda" and (reason := gpus.why_fewer_than(2)):
        pytest.skip(reason)
    env = {"JAX_PLATFORMS": "cpu" if platform == "cpu" else ""}
    job = WatchedJob(["-c", _SCRIPT], islands=2, env=env)
    job.wait(200)
    for process in range(2):
        told = [line.text for line in job.lines if line.process == process]
        for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
            for what in ("sum", "optim"):
                assert f"{what} {codec} True" in told, job.text()
