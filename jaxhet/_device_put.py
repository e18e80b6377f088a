"""`jax.device_put` between devices of several islands: a program whose exchanges move the shards.

JAX's own way, where it has one, is a transfer of XLA that no compiler pass sees.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxhet._errors import UsageError
from jaxhet._islands import Island
from jaxhet._jax import device_put
from jaxhet._jax.compat import Device
from jaxhet._jit import jit
from jaxhet._session import Observer

_AXIS = "device"

Box = tuple[tuple[int, int], ...]  # for each dimension: first index, index after the last


@dataclasses.dataclass(frozen=True)
class Move:
    """A piece of the array, its sender and its receiver (may be the same device)."""

    source: int  # id of a device
    target: int
    piece: Box


@dataclasses.dataclass(frozen=True)
class Round:
    """Moves of pieces of one shape; each device sends at most one and receives at most one.

    Attributes:
      moves: The moves.
      are_copies: Whether senders read their new shards (True) or the shards that they held before.
    """

    moves: tuple[Move, ...]
    are_copies: bool = False


def plan(
    sources: Mapping[int, Box], targets: Mapping[int, Box], islands: Mapping[int, int]
) -> list[Round]:
    """Plans how shards move, round after round. Pure.

    A shard enters an island once; other devices of the island copy it there. The sender of a piece
    is the receiver itself where it has the piece, else a device of its island, else the one that
    sends least.

    Args:
      sources: By device, the part of the array that it holds. Two parts are equal or disjoint.
      targets: By device, the part that it gets.
      islands: The island of each of these devices.
    """
    holders: dict[Box, list[int]] = collections.defaultdict(list)
    for device, box in sources.items():
        holders[box].append(device)
    groups: dict[tuple[Box, int], list[int]] = collections.defaultdict(list)
    for device, box in targets.items():
        groups[box, islands[device]].append(device)
    num_sent: collections.Counter[int] = collections.Counter()

    def sender(candidates: Sequence[int], receiver: int) -> int:
        def distance(device: int) -> tuple[bool, bool, int]:
            is_far = islands[device] != islands[receiver]
            return device != receiver, is_far, num_sent[device]

        best = min(candidates, key=distance)
        num_sent[best] += best != receiver
        return best

    moves: list[Move] = []
    copies: list[list[Move]] = []
    for (box, _), devices in groups.items():
        have = [d for d in devices if d in sources and _common(sources[d], box) == box]
        complete = have or devices[:1]
        for held, candidates in holders.items():
            if (piece := _common(held, box)) is not None:
                moves += [Move(sender(candidates, target), target, piece) for target in complete]
        rest = [d for d in devices if d not in complete]
        for step in itertools.count():
            pairs = list(zip(complete, rest, strict=False))
            if not pairs:
                break
            copies += [[]] if step == len(copies) else []
            copies[step] += [Move(*pair, box) for pair in pairs]
            complete, rest = complete + rest[: len(pairs)], rest[len(pairs) :]
    first = [Round(tuple(each)) for each in _grouped(moves)]
    return first + [Round(tuple(step), are_copies=True) for step in copies]


def _grouped(moves: Sequence[Move]) -> list[list[Move]]:
    """Groups moves of one shape; a device sends and receives at most one of each group. Pure."""
    found: list[list[Move]] = []
    for move in moves:
        for each in found:
            is_free = all(m.source != move.source and m.target != move.target for m in each)
            if is_free and _shape(each[0].piece) == _shape(move.piece):
                each.append(move)
                break
        else:
            found.append([move])
    return found


def _common(one: Box, other: Box) -> Box | None:
    """The part that two boxes have in common, or None. Pure."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(begin < end for begin, end in found) else None


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def _offset(piece: Box, box: Box) -> tuple[int, ...]:
    return tuple(p[0] - b[0] for p, b in zip(piece, box, strict=True))


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, Box]:
    """The part of an array that each device holds. A scalar counts as an array of one element."""
    boxes: dict[int, Box] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ranges = [s.indices(size) for s, size in zip(index, shape, strict=True)]
        boxes[device.id] = tuple((begin, end) for begin, end, _ in ranges) or ((0, 1),)
    return boxes


class _Program:
    """Moves the shards of one kind of array."""

    def __init__(
        self,
        rounds: Sequence[Round],
        sources: Mapping[int, Box],
        targets: Mapping[int, Box],
        mesh: Mesh,
    ):
        self._rounds, self._sources, self._targets = rounds, sources, targets
        self._rank = {device.id: rank for rank, device in enumerate(mesh.devices)}
        self._sharding = NamedSharding(mesh, P(_AXIS))
        body = jax.shard_map(
            self._body, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False
        )

        def device_put(held: jax.Array) -> jax.Array:
            return body(held)

        self._run = jit(device_put, bridge={"wire": ""})  # exact, whatever the job's option is

    def run(self, held: Mapping[Device, jax.Array], dtype: Any) -> dict[Device, jax.Array]:
        """Runs the program, if devices of this process take part.

        Args:
          held: The array's shards on devices of this process, which have a dimension.
          dtype: Their type.

        Returns:
          The result's shards. The arrays on devices without a shard mean nothing.
        """
        devices = self._sharding.addressable_devices
        if not devices:
            return {}
        num_rows, *rest = _shape(next(iter(self._sources.values())))
        shards = [
            held[device] if device in held else jnp.zeros((num_rows, *rest), dtype, device=device)
            for device in devices
        ]
        shape = (num_rows * len(self._rank), *rest)
        x = jax.make_array_from_single_device_arrays(shape, self._sharding, shards, dtype=dtype)
        return {shard.device: shard.data for shard in self._run(x).addressable_shards}

    def _body(self, held: jax.Array) -> jax.Array:
        """Gets the shard of a device, and returns the shard of the result."""
        dtype = held.dtype
        if is_narrow := jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
            # XLA's CPU compiler computes with wider types, which changes bits of NaN.
            held = lax.bitcast_convert_type(held, f"uint{jnp.finfo(dtype).bits}")
        result = jnp.zeros(_shape(next(iter(self._targets.values()))), held.dtype)
        for each in self._rounds:
            result = self._after(each, held, result)
        return lax.bitcast_convert_type(result, dtype) if is_narrow else result

    def _after(self, each: Round, held: jax.Array, result: jax.Array) -> jax.Array:
        """The new shard of a device after a round."""
        value, boxes = (result, self._targets) if each.are_copies else (held, self._sources)
        starts = {m.source: _offset(m.piece, boxes[m.source]) for m in each.moves}
        piece = lax.dynamic_slice(value, self._own(starts), _shape(each.moves[0].piece))
        if any(m.source != m.target for m in each.moves):
            pairs = [(self._rank[m.source], self._rank[m.target]) for m in each.moves]
            piece = lax.ppermute(piece, _AXIS, pairs)
        starts = {m.target: _offset(m.piece, self._targets[m.target]) for m in each.moves}
        written = lax.dynamic_update_slice(result, piece, self._own(starts))
        is_target = np.isin(list(self._rank), list(starts))
        return lax.select(self._of_rank(is_target), written, result)

    def _own(self, starts: Mapping[int, Sequence[int]]) -> list[jax.Array]:
        """Start index of the device that runs the program; 0 for a device without a part."""
        nowhere = [0] * len(next(iter(starts.values())))
        table = np.array([starts.get(device, nowhere) for device in self._rank], np.int32)
        return [self._of_rank(column) for column in table.T]

    def _of_rank(self, table: np.ndarray) -> jax.Array:
        return lax.dynamic_index_in_dim(table, lax.axis_index(_AXIS), keepdims=False)


class Puts(Observer):
    """Implementation of `jax.device_put` between devices of several islands."""

    def __init__(self, islands: Sequence[Island], process: int):
        self._island_of = {p: island.index for island in islands for p in island.processes}
        self._devices = {d.id: d for island in islands for d in island.devices}
        self._process = process
        self._do_islands_differ = functools.lru_cache(4096)(self._compare)
        self._prepared = functools.lru_cache(1024)(self._prepare)

    def install(self) -> None:
        """Makes `jax.device_put` call this object."""
        device_put.divert(self.crosses, self.put)

    def close(self) -> None:
        """Forgets the devices, which keep JAX's client (`jaxhet/_compilation.py`)."""
        self._devices.clear()
        self._do_islands_differ.cache_clear()
        self._prepared.cache_clear()

    def crosses(self, source: Sharding, target: Sharding) -> bool:
        """Whether the devices are of several islands, and not the same on both sides."""
        if source.is_fully_addressable and target.is_fully_addressable:
            return False
        return self._do_islands_differ(source, target)

    def put(self, x: jax.Array, target: Sharding) -> dict[Device, jax.Array]:
        """Moves an array.

        Every process that has devices of the array or of the result must call it.

        Args:
          x: The array.
          target: Sharding of the result.

        Returns:
          The result's shards on devices of this process, which have memory of their own.

        Raises:
          UsageError: A sharding is of a kind that can't be moved.
        """
        self._check(x.sharding, target)
        own = [d for d in target.device_set if d.process_index == self._process]
        shape = target.shard_shape(x.shape)
        if not x.size:
            return {device: jnp.zeros(shape, x.dtype, device=device) for device in own}
        held = {s.device: s.data.reshape(s.data.shape or (1,)) for s in x.addressable_shards}
        moved = self._prepared(x.sharding, target, x.shape).run(held, x.dtype)
        return {device: moved[device].reshape(shape) for device in own}

    def _compare(self, source: Sharding, target: Sharding) -> bool:
        one, other = source.device_set, target.device_set
        if not all(self._devices.get(device.id) is device for device in one | other):
            return False  # JAX refuses what crosses processes to other devices than the job's
        return one != other and len({self._island_of[d.process_index] for d in one | other}) > 1

    def _prepare(self, source: Sharding, target: Sharding, shape: tuple[int, ...]) -> _Program:
        """The program that moves arrays of such a shape."""
        sources, targets = _boxes(source, shape), _boxes(target, shape)
        devices = source.device_set | target.device_set
        rounds = plan(sources, targets, {d.id: self._island_of[d.process_index] for d in devices})
        moves = [move for each in rounds for move in each.moves]
        moving = sorted({m.source for m in moves} | {m.target for m in moves})
        mesh = Mesh(np.array(self._taking_part(moving), dtype=object), (_AXIS,))
        return _Program(rounds, sources, targets, mesh)

    def _taking_part(self, moving: Sequence[int]) -> list[Device]:
        """The devices that run the program, which has this order on all processes.

        On CPUs all devices of a process run it: XLA does not order a program of one device after
        an earlier program of several.
        """
        devices = [self._devices[i] for i in moving]
        if devices[0].platform != "cpu":
            return devices
        processes = {device.process_index for device in devices}
        return [d for _, d in sorted(self._devices.items()) if d.process_index in processes]

    def _check(self, source: Sharding, target: Sharding) -> None:
        if problem := self._problem(source) or self._problem(target):
            raise UsageError(
                f"jax.device_put between islands, from {source} to {target}: {problem}"
            )

    def _problem(self, sharding: Sharding) -> str:
        """Why arrays of this sharding can't be moved, or ""."""
        kind = next(iter(self._devices.values())).default_memory().kind
        if sharding.memory_kind not in (None, kind):
            return (
                f"memory of kind {sharding.memory_kind} is not moved between islands; move the"
                f" array between it and memory of kind {kind} in a second call"
            )
        if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
            return "an unreduced array is not moved between islands; reduce it before"
        return ""
