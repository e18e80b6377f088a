"""The program of a job of `jaxhet doctor --qualify`: every two ranks exchange bytes.

    python -m jaxhet._doctor.exchanges FILE

FILE receives a `Found` of this process as JSON, also after a failure of the job. Each round pairs
the ranks, and all pairs exchange at the same time, both ways. A kernel writes the bytes right
before they are sent, others each time, and another kernel compares them where they arrive.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet._job.proofs import Swap

# Around the engine's limits: eager messages up to 16 KiB, chunks of 512 KiB. On GPUs all are under
# way at the same time.
SIZES = (8, 16 << 10, (16 << 10) + 1, (512 << 10) - 1, 1 << 20, 16 << 20)
CHECKS = 20  # exchanges of each size and pair of ranks that are compared
# Size in bytes -> number of timed swaps, one after the other. Even numbers return all bytes.
TIMED = {8: 200, 1 << 20: 40, 16 << 20: 8}
_AXIS = "rank"


@dataclasses.dataclass
class PeerFound:
    """Findings of a process about its exchanges with another one.

    Attributes:
      transports: Transports that these exchanges used.
      refused: Transports that the two can't use, and why.
      problem: Why the exchanges are not right, or "".
      swaps: Times of the exchanges.
      rounds_left: Rounds with the other process that this one has not finished.
    """

    transports: list[str] = dataclasses.field(default_factory=list)
    refused: list[list[str]] = dataclasses.field(default_factory=list)
    problem: str = ""
    swaps: list[Swap] = dataclasses.field(default_factory=list)
    rounds_left: int = 0


@dataclasses.dataclass
class Found:
    """Findings of a process.

    Attributes:
      peers: By process, as text; none if the job did not start.
      error: Failure of the job, or "".
    """

    peers: dict[str, PeerFound] = dataclasses.field(default_factory=dict)
    error: str = ""


type Round = list[tuple[int, int]]


def rounds(processes: Sequence[int]) -> list[Round]:
    """Pairs of ranks of different processes; each rank has one partner in a round at most. Pure.

    Args:
      processes: The process of each rank.
    """
    ranks: list[int | None] = [*range(len(processes)), *([None] if len(processes) % 2 else [])]
    half = len(ranks) // 2
    found = []
    for _ in ranks[1:]:  # all but the first move on by one place: the circle method
        opposite = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        found.append([(a, b) for a, b in pairs if processes[a] != processes[b]])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return [pairs for pairs in found if pairs]


class Job:
    """The devices of the job, and the programs over all of them."""

    def __init__(self) -> None:
        self._devices = jax.devices()
        self._processes = [device.process_index for device in self._devices]
        self._on_cpus = all(island.platform == "cpu" for island in jaxhet.islands())
        self._mesh = Mesh(np.array(self._devices), (_AXIS,))
        self.found = Found()

    def run(self) -> None:
        """Runs all rounds and stores their results in `found`."""
        all_rounds = [(pairs, self._peers(pairs)) for pairs in rounds(self._processes)]
        for _, mine in all_rounds:
            for peer in set(mine.values()):
                self.found.peers.setdefault(peer, PeerFound()).rounds_left += 1
        try:
            for pairs, mine in all_rounds:
                self._check(pairs, mine)
                self._time(pairs, mine)
                for peer in set(mine.values()):
                    self.found.peers[peer].rounds_left -= 1
        finally:
            for path in jaxhet.paths():
                found = self.found.peers[str(path.process)]
                found.transports = [name for name in path.transport.split("+") if name]
                found.refused = [[refused.transport, refused.reason] for refused in path.refused]

    def _peers(self, pairs: Round) -> dict[int, str]:
        """The process of the partner of each of this process's ranks."""
        both = [*pairs, *((b, a) for a, b in pairs)]
        own = jax.process_index()
        return {a: str(self._processes[b]) for a, b in both if self._processes[a] == own}

    def _check(self, pairs: Round, mine: dict[int, str]) -> None:
        partners = list(range(len(self._devices)))
        for a, b in pairs:
            partners[a], partners[b] = b, a

        def wrong(step: jax.Array) -> jax.Array:
            rank = jax.lax.axis_index(_AXIS)
            partner = jnp.asarray(partners)[rank]
            counts: list[jax.Array] = []
            for i, num_bytes in enumerate(SIZES):
                seed = step * len(SIZES) + i
                if self._on_cpus and counts:  # independent ones would be one exchange on CPUs
                    seed += counts[-1].astype(seed.dtype)
                received = self._swap(pairs)(pattern(rank, seed, num_bytes))
                counts.append(jnp.sum(received != pattern(partner, seed, num_bytes)))
            return jnp.stack(counts)[None]

        program = self._jit(wrong, P(), P(_AXIS))
        for step in range(CHECKS):
            self._look(program(jnp.uint32(step)), mine, SIZES, f"exchange {step}")

    def _time(self, pairs: Round, mine: dict[int, str]) -> None:
        swap = self._jit(self._swap(pairs), P(_AXIS), P(_AXIS))
        for num_bytes, repeats in TIMED.items():
            x = self._first(num_bytes)()
            times = []
            for _ in range(repeats):
                jax.block_until_ready(x)
                start = time.perf_counter()
                x = swap(x)
                jax.block_until_ready(x)
                times.append(time.perf_counter() - start)
            self._look(self._unlike_first(num_bytes)(x), mine, (num_bytes,), f"{repeats} exchanges")
            p50_s = statistics.median(times)
            swap_found = Swap(num_bytes, repeats, p50_s * 1e6, num_bytes / p50_s / 1e9)
            for peer in mine.values():
                swaps = self.found.peers[peer].swaps
                if all(known.num_bytes != num_bytes for known in swaps):
                    swaps.append(swap_found)

    def _look(
        self, counts: jax.Array, mine: dict[int, str], sizes: Sequence[int], when: str
    ) -> None:
        """Reads the number of wrong bytes of each rank and size."""
        jaxhet.block_until_ready(counts)
        for shard in counts.addressable_shards:
            rank = shard.index[0].start or 0
            for num_bytes, count in zip(sizes, np.asarray(shard.data)[0], strict=True):
                if count and rank in mine and not self.found.peers[mine[rank]].problem:
                    problem = f"{when}: {count} of {num_bytes} bytes are not what was sent"
                    self.found.peers[mine[rank]].problem = problem

    @staticmethod
    def _swap(pairs: Round) -> Callable[[jax.Array], jax.Array]:
        both = [*pairs, *((b, a) for a, b in pairs)]
        return lambda x: jax.lax.ppermute(x, _AXIS, both)

    @functools.cache  # noqa: B019  the job lives as long as the process
    def _first(self, num_bytes: int) -> Callable[[], jax.Array]:
        return self._jit(
            lambda: pattern(jax.lax.axis_index(_AXIS), num_bytes, num_bytes), (), P(_AXIS)
        )

    @functools.cache  # noqa: B019
    def _unlike_first(self, num_bytes: int) -> Callable[[jax.Array], jax.Array]:
        def count(x: jax.Array) -> jax.Array:
            first = pattern(jax.lax.axis_index(_AXIS), num_bytes, num_bytes)
            return jnp.sum(x != first)[None, None]

        return self._jit(count, P(_AXIS), P(_AXIS))

    def _jit(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(mapped, out_shardings=NamedSharding(self._mesh, out_specs))


def pattern(rank: jax.Array | int, seed: jax.Array | int, num_bytes: int) -> jax.Array:
    """Bytes that depend on the rank, the seed and their places: a multiplicative hash."""
    mixed = jnp.uint32(rank) * np.uint32(0x85EBCA6B) + jnp.uint32(seed) * np.uint32(0xC2B2AE35)
    places = jnp.arange(num_bytes, dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    hashed = (places ^ mixed) * np.uint32(0x27D4EB2F)
    return ((hashed ^ (hashed >> 15)) >> 8).astype(jnp.uint8)


def main(file: pathlib.Path) -> None:
    """Joins the job, and makes all exchanges."""
    found = Found()
    try:
        jaxhet.initialize()
        job = Job()
        found = job.found
        job.run()
    except (jaxhet.JaxhetError, jax.errors.JaxRuntimeError) as error:
        cause = jaxhet.last_error() or error
        found.error = f"{type(cause).__name__}: {cause}"
    finally:
        file.write_text(json.dumps(dataclasses.asdict(found)))
        jaxhet.shutdown()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
