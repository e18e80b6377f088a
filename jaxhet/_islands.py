"""Islands, their processes and their devices."""

import dataclasses
from collections.abc import Sequence

from jaxhet._jax.compat import Device
from jaxhet._job.process_info import ProcessInfo


@dataclasses.dataclass(frozen=True)
class Island:
    """The processes that share one vendor runtime and one local collective library.

    Attributes:
      name: declared name, else the platform.
      index: index in `jaxhet.islands()`; sums over islands are taken in this order.
      platform: JAX's name of the platform: "cpu", "cuda" or "rocm".
      processes: JAX process indices.
      hosts: the machine of each process.
      ranks: indices of the island's devices in the sorted list of the job's device ids.
      devices: the island's devices, in the order of `ranks`.
    """

    name: str
    index: int
    platform: str
    processes: tuple[int, ...]
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    devices: tuple[Device, ...] = dataclasses.field(repr=False)


def of_process(islands: Sequence[Island], process: int) -> Island:
    """The island of a process. Pure."""
    return next(island for island in islands if process in island.processes)


def by_rank(islands: Sequence[Island]) -> dict[int, tuple[Island, Device]]:
    """The island and the device of each rank of the job, in the order of ranks. Pure."""
    found = {
        rank: (island, device)
        for island in islands
        for rank, device in zip(island.ranks, island.devices, strict=True)
    }
    return {rank: found[rank] for rank in sorted(found)}


def names(members: Sequence[ProcessInfo]) -> list[str]:
    """The islands' names by island index, that is, in the order of their first processes. Pure."""
    return list(dict.fromkeys(m.island for m in sorted(members, key=lambda m: m.process)))


def make_islands(members: Sequence[ProcessInfo], devices: Sequence[Device]) -> tuple[Island, ...]:
    """Groups processes and devices by island; islands are ordered by their first process. Pure."""
    ordered = sorted(devices, key=lambda d: d.id)
    islands = []
    for index, name in enumerate(names(members)):
        mine = sorted((m for m in members if m.island == name), key=lambda m: m.process)
        processes = tuple(m.process for m in mine)
        ranks = tuple(r for r, d in enumerate(ordered) if d.process_index in processes)
        islands.append(
            Island(
                name=name,
                index=index,
                platform=mine[0].platform,
                processes=processes,
                hosts=tuple(m.host for m in mine),
                ranks=ranks,
                devices=tuple(ordered[r] for r in ranks),
            )
        )
    return tuple(islands)
