"""Members of a collective: HLO's replica groups as ranks, and their division by island.

Pure functions on integers. Two numberings occur:
  logical id  index in the module's device assignment, HLO's partition id
  rank        index in the job's sorted list of device ids
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def iota_groups(num_groups: int, reshape: Sequence[int], permutation: Sequence[int]) -> Groups:
    """The groups `[num_groups,size]<=[reshape]T(permutation)`."""
    ids = np.arange(math.prod(reshape)).reshape(reshape).transpose(permutation)
    return _rows(ids, num_groups)


@dataclasses.dataclass(frozen=True)
class AxisRef:
    """A mesh axis or its part `(pre_size)size`: dimension 1 of the axis as [pre_size, size, -1]."""

    axis: int
    pre_size: int = 1
    size: int | None = None


def mesh_groups(
    axis_sizes: Sequence[int], device_ids: Sequence[int], refs: Sequence[AxisRef]
) -> Groups:
    """The groups `mesh[sizes], device_ids=(...) {refs}`, members in the order of `refs`.

    There is one group for each index on the other axes.
    """
    cuts = [{1, size} for size in axis_sizes]
    for ref in refs:
        cuts[ref.axis] |= {ref.pre_size, ref.pre_size * (ref.size or axis_sizes[ref.axis])}
    dims: list[int] = []
    first_dim: list[dict[int, int]] = []  # per axis: product of the sizes on the left -> dimension
    for axis_cuts in map(sorted, cuts):
        first_dim.append({cut: len(dims) + i for i, cut in enumerate(axis_cuts[:-1])})
        dims += [after // before for before, after in itertools.pairwise(axis_cuts)]
    grouped = [first_dim[r.axis][r.pre_size] for r in refs if r.pre_size in first_dim[r.axis]]
    others = [d for d in range(len(dims)) if d not in grouped]
    ids = np.array(device_ids or range(int(np.prod(axis_sizes)))).reshape(dims)
    return _rows(
        ids.transpose(others + grouped), int(np.prod([dims[d] for d in others], dtype=int))
    )


def _rows(ids: np.ndarray, num_groups: int) -> Groups:
    return tuple(tuple(row) for row in ids.reshape(num_groups, -1).tolist())


def map_groups(groups: Groups, table: Sequence[int]) -> Groups:
    """Each member replaced by its entry in `table`."""
    return tuple(tuple(table[member] for member in group) for group in groups)


def are_equal(groups: Groups) -> bool:
    """Whether all groups have the same number of members."""
    return len(set(map(len, groups))) <= 1


def both_ways(pairs: Groups) -> Groups:
    """Source and target of a permute in which the two members of each group exchange."""
    return tuple(pair for a, b in pairs for pair in ((a, b), (b, a)))


def largest(groups: Groups) -> int:
    """Number of members of the largest group."""
    return max(map(len, groups))


def padded(groups: Groups, size: int) -> tuple[int, ...]:
    """The groups one after the other, each padded with -1 to `size` members."""
    return tuple(m for group in groups for m in (*group, *[-1] * (size - len(group))))


def covering(groups: Groups, num_logical_ids: int) -> Groups:
    """The smallest equal groups of all logical ids that are at least as large as each of `groups`.

    These are `groups` themselves if they are equal.
    """
    if are_equal(groups):
        return groups
    sizes = range(largest(groups), num_logical_ids + 1)
    size = next(size for size in sizes if num_logical_ids % size == 0)
    return tuple(itertools.batched(range(num_logical_ids), size))


def crosses(group: Sequence[int], islands: Sequence[int]) -> bool:
    """Whether a group of ranks has members on more than one island."""
    return len({islands[rank] for rank in group}) > 1


@dataclasses.dataclass(frozen=True)
class Split:
    """Groups divided by island, for a hierarchical algorithm; holds logical ids.

    Attributes:
      local: The members of one group on one island, in group order.
      rails: The members of one group with one place among their island's, in order of islands.
      places: (rail's place of the island, place on the island) of each member of a group, in group
        order; None if groups differ in that.
    """

    local: Groups
    rails: Groups
    places: tuple[tuple[int, int], ...] | None

    @property
    def num_islands(self) -> int:
        """Number of islands in each group."""
        return len(self.rails[0])

    @property
    def local_size(self) -> int:
        """Members of each group on each of its islands."""
        return len(self.local[0])


def split(groups: Groups, ranks: Sequence[int], islands: Sequence[int]) -> Split | str:
    """Divides groups by island, or says why they are not symmetric.

    Groups are symmetric if all have the same number of islands, and of members on each.

    Args:
      groups: The groups, in logical ids.
      ranks: Logical id to rank.
      islands: Rank to island.
    """
    local: list[tuple[int, ...]] = []
    rails: list[tuple[int, ...]] = []
    sizes: set[tuple[int, ...]] = set()
    all_places: set[tuple[tuple[int, int], ...]] = set()
    for group in groups:
        by_island: dict[int, list[int]] = {}
        for logical_id in group:
            by_island.setdefault(islands[ranks[logical_id]], []).append(logical_id)
        members = [tuple(by_island[island]) for island in sorted(by_island)]
        sizes.add(tuple(map(len, members)))
        place_of = {p: (i, j) for i, local_ in enumerate(members) for j, p in enumerate(local_)}
        all_places.add(tuple(place_of[logical_id] for logical_id in group))
        local += members
        rails += zip(*members, strict=False)
    if len(sizes) > 1:
        return f"groups have different members per island: {_list(sizes)}"
    if len(set(next(iter(sizes)))) > 1:
        return f"islands have different numbers of members: {_list(sizes)}"
    places = all_places.pop() if len(all_places) == 1 else None
    return Split(tuple(local), tuple(rails), places)


def _list(sizes: set[tuple[int, ...]]) -> str:
    return ", ".join("+".join(map(str, size)) for size in sorted(sizes))


def to_text(groups: Groups) -> str:
    """Groups as HLO prints lists: `{{0,1},{2,3}}`."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"
