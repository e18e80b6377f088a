"""Results in host memory of programs that exchange."""

from tests.support import scripts

_PROGRAM = """
import jax, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": 4})
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
rows = np.arange(24, dtype=np.float32).reshape(4, 6)
x = jax.make_array_from_callback(rows.shape, split, rows.__getitem__)
for kind in ("pinned_host", "unpinned_host"):
    host = whole.with_memory_kind(kind)
    total = jax.jit(lambda a: a.sum(0), out_shardings=host)(x)
    shardings = host, whole, split.with_memory_kind(kind)
    results = jax.jit(lambda a: (a.sum(0), a.max(0), 2 * a), out_shardings=shardings)(x)
    assert total.sharding == host
    assert [result.sharding for result in results] == [*shardings]
    np.testing.assert_array_equal(total, rows.sum(0))
    np.testing.assert_array_equal(results[0], rows.sum(0))
    np.testing.assert_array_equal(results[1], rows.max(0))
    for shard in results[2].addressable_shards:
        np.testing.assert_array_equal(shard.data, 2 * rows[shard.index])
    again = jax.jit(lambda a, h: jax.device_put(h, whole) + a.sum(0))(x, total)
    np.testing.assert_array_equal(again, 2 * rows.sum(0))
jaxhet.shutdown()
print("all are right")
"""


def test_results_are_in_the_memory_that_the_program_says() -> None:
    for one in scripts.run(_PROGRAM, *scripts.job(JAXHET_CPU_DEVICES="2"), timeout_s=120):
        assert one.code == 0, one.text
        assert "all are right" in one.text
