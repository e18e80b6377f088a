"""One process of two islands, in a guest: programs with every kind of exchange, checked by numpy.

Prints a line "ok NAME" or "FAIL NAME: REASON" for each.
"""

import os
from collections.abc import Callable, Iterator

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


# Per rank's block; what the whole array is afterwards.
_PROGRAMS: dict[str, tuple[_Program, Callable[[np.ndarray], np.ndarray]]] = {
    "psum": (_psum, lambda whole: np.tile(whole.reshape(2, -1).sum(0), 2)),
    "all_gather": (_all_gather, lambda whole: np.tile(whole, 2)),
    "permute": (_permute, lambda whole: np.roll(whole, whole.size // 2)),
    "all_to_all": (_all_to_all, _blocks_swapped),
}


def _checks() -> Iterator[tuple[str, Callable[[], None]]]:
    mesh = jaxhet.make_mesh({"rank": 2})
    sharding = NamedSharding(mesh, PartitionSpec("rank"))

    def check(name: str, num_elements: int) -> None:
        program, expect = _PROGRAMS[name]
        whole = np.random.default_rng(num_elements).integers(0, 1 << 30, 2 * num_elements)
        whole = whole.astype(np.int32)
        x = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
        mapped = jax.shard_map(
            program, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
        y = jaxhet.jit(mapped)(x)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expect(whole)[shard.index])

    for name in _PROGRAMS:
        for size in _SIZES:
            # all_to_all splits a rank's block in two.
            num_elements = size // 4 * (2 if name == "all_to_all" else 1)
            yield f"{name}-{size}", lambda name=name, n=num_elements: check(name, n)


def main() -> None:
    jaxhet.initialize()
    (transport,) = os.environ["JAXHET_TRANSPORTS"].split(",")
    for name, check in _checks():
        try:
            check()
        except Exception as error:
            print(f"FAIL {name}: {str(error)[:2000]}", flush=True)
            raise
        print(f"ok {name}", flush=True)
    stats = jaxhet.stats()
    moved = {name for name, n in stats.items() if name.startswith("bytes_") and n}
    used = {name.rpartition("_")[2] for name in moved}
    assert used == {"local", transport}, stats
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
