"""Exchanges in a branch that some devices of a process take and others do not."""

import re

import pytest
from two_islands import SET_UP

from tests.support import scripts

# Ranks 0 and 2 are a pair over the islands, and so are ranks 1 and 3. Only the second pair sums.
_PROGRAM = """
mesh, spec = jaxhet.make_mesh({"a": 2, "b": 2}), P(("a", "b"))
for size in (3, 100_000):  # one all-gather; one permute of pairs
    rows = np.arange(4.0, dtype=np.float32)[:, None] + np.zeros((4, size), np.float32)
    x = put(rows, spec)

    def branch(v):
        is_second = jax.lax.axis_index("b") == 1
        return jax.lax.cond(is_second, lambda w: jax.lax.psum(w, "a"), lambda w: w, v)

    step = jax.jit(jax.shard_map(branch, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    for _ in range(2):
        for shard in step(x).addressable_shards:
            row = shard.index[0].start
            np.testing.assert_array_equal(shard.data, np.full((1, size), (0, 4, 2, 4)[row]))
    if EVERY_RANK:
        total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
        assert float(total) == 6 * size
start = time.monotonic()
jaxhet.shutdown()
print(f"left in {time.monotonic() - start:.1f} s")
"""


@pytest.mark.parametrize("every_rank", [True, False])
def test_exchange_in_a_branch_of_some_devices(every_rank: bool) -> None:
    """A later exchange of all devices ends the wait for those that took the other branch."""
    ended = scripts.run(
        SET_UP + _PROGRAM.replace("EVERY_RANK", str(every_rank)),
        *scripts.job(JAXHET_CPU_DEVICES="2"),
        timeout_s=120,
    )
    for one in ended:
        assert one.code == 0, one.text
        found = re.search(r"left in ([\d.]+) s", one.text)
        assert found is not None, one.text
        assert float(found[1]) < (5 if every_rank else 20)
