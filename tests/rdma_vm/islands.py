"""One process of two islands, in a guest: programs with every kind of exchange, checked by numpy.

Prints a line "ok NAME" or "FAIL NAME: REASON" for each.
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxhet

# Bytes of one rank's operand: up to eager_bytes, around chunk_bytes, and around the largest message
# of soft-RoCE.
_CHUNK = 512 << 10
_MESSAGE = 8 << 20
_SIZES = (4, 28, _CHUNK - 4, _CHUNK, _CHUNK + 4, _MESSAGE - 4, _MESSAGE, _MESSAGE + 4)
_Program = Callable[[jax.Array], jax.Array]


def _psum(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "rank")


def _all_gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "rank", tiled=True)


def _permute(x: jax.Array) -> jax.Array:
    return jax.lax.ppermute(x, "rank", [(0, 1), (1, 0)])


def _all_to_all(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, "rank", 0, 0, tiled=True)


def _blocks_swapped(whole: np.ndarray) -> np.ndarray:
    return whole.reshape(2, 2, -1).swapaxes(0, 1).ravel()


# The program of a rank's block, and a function that computes the whole result.
_PROGRAMS: dict[str, tuple[_Program, Callable[[np.ndarray], np.ndarray]]] = {
    "psum": (_psum, lambda whole: np.tile(whole.reshape(2, -1).sum(0), 2)),
    "all_gather": (_all_gather, lambda whole: np.tile(whole, 2)),
    "permute": (_permute, lambda whole: np.roll(whole, whole.size // 2)),
    "all_to_all": (_all_to_all, _blocks_swapped),
}


def _check(name: str, num_bytes: int) -> None:
    mesh = jaxhet.make_mesh({"rank": 2})
    spec = PartitionSpec("rank")
    program, expect = _PROGRAMS[name]
    blocks = 2 if name == "all_to_all" else 1  # parts of a rank's block
    num_elements = 2 * blocks * num_bytes // 4
    whole = np.random.default_rng(num_bytes).integers(0, 1 << 30, num_elements, np.int32)
    x = jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
    )
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for shard in jaxhet.jit(mapped)(x).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expect(whole)[shard.index])


def main() -> None:
    jaxhet.initialize()
    for name, size in itertools.product(_PROGRAMS, _SIZES):
        try:
            _check(name, size)
        except Exception as error:
            print(f"FAIL {name}-{size}: {str(error)[:2000]}", flush=True)
            raise
        print(f"ok {name}-{size}", flush=True)
    stats = jaxhet.stats()
    moved = {name for name, n in stats.items() if name.startswith("bytes_") and n}
    assert {name.rpartition("_")[2] for name in moved} == {"local", "verbs"}, stats
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
