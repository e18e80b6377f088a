"""Device channels between the GPUs of a job: which ones exist from the start, and the others.

A pair is a rank of this process and another rank. It has a channel in each direction.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxhet import _islands
from jaxhet._config import PlacedConfig
from jaxhet._islands import Island
from jaxhet._job import bootstrap
from jaxhet._job.process_info import ProcessInfo

Pair = tuple[int, int]

_SHARED_MEMORY = ("cuda_ipc", "hip_ipc", "host")
_NETWORK = ("socket", "verbs")


def rails(islands: Iterable[Sequence[int]]) -> set[Pair]:
    """Two ranks in the same place of their islands, both ways. Pure.

    A smaller island has several ranks in a place. Hierarchical collectives exchange between them.
    """
    found = set()
    for lists in itertools.permutations(islands, 2):
        own, other = lists
        for place, one in enumerate(own):
            partner = other[place % len(other)]
            found |= {(one, partner), (partner, one)}
    return found


@dataclasses.dataclass(frozen=True)
class ChannelPlan:
    """The pairs of one process.

    Attributes:
      ranks: Ranks of this process.
      process_of: Process of each rank of the job.
      sockets: Number of sockets for data of each pair that may need some. A rank divides
        `bootstrap.DEVICE_SOCKETS` among its partners on rails, and as many among all other ranks;
        each has at least one.
      later: Pairs whose channels are opened when a program needs them.
    """

    ranks: tuple[int, ...]
    process_of: Mapping[int, int]
    sockets: Mapping[Pair, int]
    later: frozenset[Pair]

    def later_with(self, process: int) -> list[Pair]:
        """Pairs of `later` with ranks of another process, in an order that both ends know."""
        found = [pair for pair in self.later if self.process_of[pair[1]] == process]
        return sorted(found, key=lambda pair: (min(pair), max(pair)))

    def sockets_of(
        self, pairs: Iterable[Pair], members: Sequence[ProcessInfo]
    ) -> dict[Pair, tuple[ProcessInfo, int]]:
        """Process and number of sockets for data of the pairs that may need sockets."""
        return {
            pair: (members[self.process_of[pair[1]]], self.sockets[pair])
            for pair in pairs
            if pair in self.sockets
        }


def plan_channels(
    config: PlacedConfig,
    islands: Sequence[Island],
    members: Sequence[ProcessInfo],
    connected: Collection[int],
) -> ChannelPlan:
    """The pairs of this process. Pure; both ends come to the same result.

    Pairs with shared memory have their channels from the start, and so have rails over a network if
    the processes are connected from the start. All others can wait.

    Args:
      config: The options.
      islands: The islands of the job.
      members: All processes.
      connected: Processes that are connected with this one from the start.
    """
    process_of = {r: d.process_index for r, (_, d) in _islands.by_rank(islands).items()}
    ranks = tuple(r for r, process in process_of.items() if process == config.process_id)
    rail = rails(island.ranks for island in islands)
    partners = collections.Counter(one for one, _ in rail)
    host = members[config.process_id].host_id
    has_network = not set(_NETWORK).isdisjoint(config.transports)
    sockets: dict[Pair, int] = {}
    later: set[Pair] = set()
    for pair in itertools.product(ranks, process_of):
        process = process_of[pair[1]]
        if process == config.process_id:
            continue
        is_on_host = members[process].host_id == host
        shares_memory = is_on_host and not set(_SHARED_MEMORY).isdisjoint(config.transports)
        if has_network and not (is_on_host and "host" in config.transports):
            shares = max(partners[rank] for rank in pair) if pair in rail else len(process_of) - 1
            sockets[pair] = max(1, bootstrap.DEVICE_SOCKETS // shares)
        is_early = shares_memory or (pair in rail and process in connected)
        if has_network and config.connect != "all" and not is_early:
            later.add(pair)
    return ChannelPlan(ranks, process_of, sockets, frozenset(later))
