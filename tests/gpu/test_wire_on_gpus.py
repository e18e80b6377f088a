"""Codecs on GPUs: the bits of the reference, in sums over two islands and in `jaxhet.optim`."""

import pytest

from tests.gpu.scripts_on_gpus import ON_BOTH, told

_SCRIPT = """
from jaxhet._microscaling import decode, encode
from tests.support import microscaling

rows = [microscaling.drawn(i, (16, 1 << 16)).reshape(1, -1) for i in range(2)]
x = put(np.concatenate(rows))

def is_equal(found, right):
    numbers = ~np.isnan(right)
    same = found.view(np.uint32)[numbers] == right.view(np.uint32)[numbers]
    return same.all() and np.isnan(found[~numbers]).all()

for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
    found = np.asarray(over_islands(psum, bridge={"wire": codec})(x).addressable_data(0))
    print("sum", codec, is_equal(found[0], microscaling.summed([r[0] for r in rows], codec)))
    back = jax.jit(lambda v, codec=codec: decode(encode(v, codec), codec, v.shape))(rows[0])
    print("optim", codec, is_equal(np.asarray(back)[0], microscaling.decoded(rows[0], codec)[0]))
"""


@pytest.mark.timeout(300)
@ON_BOTH
def test_codecs_have_the_bits_of_the_reference(platform: str) -> None:
    both, job = told(platform, _SCRIPT)
    for lines in both:
        for codec in ("bf16", "mxfp8", "mxint8", "mxint4"):
            for what in ("sum", "optim"):
                assert f"{what} {codec} True" in lines, job.text()
