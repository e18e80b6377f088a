"""Processes with equal GPUs share executables: values are right, and no process waits for long."""

import re

from tests.gpu.scripts_on_gpus import ON_BOTH, told

# The programs differ only in the result of the function of `partition`.
_FACTORY = """
from tests.multiprocess.pairs import partitioned

def make(factor):
    scaled = partitioned(lambda v: v * 1, lambda v: v * factor)
    total = lambda v: jnp.broadcast_to(jnp.sum(scaled(v), axis=0), v.shape)
    return jax.jit(total, out_shardings=x.sharding)

for factor in (2, 3, 4):
    result = jax.block_until_ready(make(factor)(x))
    print("value", np.asarray(result.addressable_data(0))[0, 0], flush=True)
"""
# With jax_debug_nans a process with a NaN raises, while another one may compile the next program.
_NANS = """
jax.config.update("jax_debug_nans", True)
x = put(np.arange(8, dtype=np.float32))
begin = time.monotonic()
try:
    print("value", jax.jit(lambda v: jnp.log(v - 1).sum())(x), flush=True)
except Exception as error:
    seconds = time.monotonic() - begin
    print(f"raised {type(error).__name__} after {seconds:.1f} s: {error}", flush=True)
"""


@ON_BOTH
def test_programs_that_differ_in_a_partition_function_have_their_own_values(platform: str) -> None:
    both, job = told(platform, _FACTORY)
    for mine in both:
        values = [text for text in mine if text.startswith("value")]
        assert values == ["value 4.0", "value 6.0", "value 8.0"], job.text()


@ON_BOTH
def test_process_does_not_wait_for_programs_of_one_that_has_raised(platform: str) -> None:
    _, job = told(platform, _NANS)
    raised = [job.first(process, "raised") for process in range(2)]
    for process, line in enumerate(raised):
        assert line, f"process {process} has not raised:\n{job.text()}"
        found = re.match(r"raised (\w+) after (\S+) s", line.text)
        assert found, line.text
        assert found[1] in ("FloatingPointError", "PeerError", "JaxRuntimeError"), job.text()
        assert float(found[2]) < 20, job.text()
