"""Shares of a batch by the speed of each island: `--balance`.

A batch is `--accumulate` microbatches for each position of the mesh axis `data`. Each island is
measured alone, on its own devices and without the exchange, with two numbers of microbatches. The
times say how many microbatches each position computes (`jaxhet.balanced_split`). The rows of a
batch and their order do not depend on it.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

import jaxhet
from models.data import Batches
from models.extras.accumulate import value_and_grad_of_shares
from models.extras.options import Options
from models.extras.reporter import Reporter
from models.extras.shares import (
    AUTO,
    AXIS,
    Controller,
    Cost,
    fit,
    longest,
    num_microbatches,
    parse_counts,
)
from models.sharding import activation_sharding
from models.train import Params, Trainer

# Two numbers of microbatches that an island computes alone, and how often.
_FEW, _MANY, _REPEATS = 1, 16, 5


class Balance:
    """The shares of a run, and its batches cut into them."""

    def __init__(
        self,
        options: Options,
        trainer: Trainer,
        batches: Batches,
        islands: Sequence[jaxhet.Island],
    ) -> None:
        """The balance of a run; without `islands` all devices are one island."""
        mesh, text = trainer.mesh, options.balance
        assert text is not None
        total, size = num_microbatches(options, mesh), mesh.shape[AXIS]
        self._batches = batches
        self._rows = batches.batch // total
        self._most = total - size + 1
        self._sharding = activation_sharding("shares", mesh)
        self._islands = _islands_of_positions(mesh, islands)
        mine = self._islands[_position(mesh, jax.local_devices()[0])]
        self._own = [i for i, island in enumerate(self._islands) if island == mine]
        self._controller = Controller(parse_counts(text, total, size))
        microbatch = batches.rows(0, 0, self._rows)
        self._alone = _Alone(trainer, microbatch, self._own) if text == AUTO else None

    def inputs(self, step: int) -> tuple[jax.Array, Any]:
        """The arguments of a step behind the state: shares and their numbers of microbatches."""
        counts = self._controller.counts
        shares = self._batches.shares(step, counts, (self._most, self._rows), self._sharding)
        return shares, np.array(counts, np.int32)

    def begin(self, reporter: Reporter, params: Params) -> None:
        """Chooses the first shares. All processes call it, with the parameters of the job."""
        if self._alone:
            self._measure(reporter, params)
        else:
            self._tell(reporter, "as --balance says", [])

    def review(self, reporter: Reporter, params: Params) -> None:
        """Measures again if the time of a step has changed; after each report."""
        if self._alone is None:
            return
        seconds = float(np.max(process_allgather(np.float32(reporter.seconds_per_step))))
        if self._controller.is_due(seconds):
            reporter.aside(lambda: self._measure(reporter, params))

    def _measure(self, reporter: Reporter, params: Params) -> None:
        assert self._alone is not None
        cost = self._alone.measure(params)
        mine = np.zeros((len(self._islands), 2), np.float32)
        mine[self._own] = (cost.microbatch, cost.fixed)
        slowest = np.max(process_allgather(mine), axis=0).astype(float)
        costs = [Cost(*map(float, row)) for row in slowest]
        is_new = self._controller.decide(costs)
        self._tell(
            reporter, "measured" if is_new else "measured: no other shares gain enough", costs
        )

    def _tell(self, reporter: Reporter, why: str, costs: Sequence[Cost]) -> None:
        counts = self._controller.counts
        even = (sum(counts) // len(counts),) * len(counts)
        note: dict[str, Any] = {"counts": list(counts), "why": why}
        text = f"balance: {','.join(map(str, counts))} microbatches ({why})"
        if costs:
            note["microbatch_seconds"] = [cost.microbatch for cost in costs]
            note["fixed_seconds"] = [cost.fixed for cost in costs]
            note["step_seconds"] = longest(costs, counts)
            note["even_step_seconds"] = longest(costs, even)
            each = ", ".join(
                f"{island} {cost.microbatch:.3g} s + {cost.fixed:.2g} s"
                for island, cost in dict(zip(self._islands, costs, strict=True)).items()
            )
            text += (
                f"; a microbatch and the rest of a step take {each}; the slowest needs "
                f"{longest(costs, counts):.3g} s, with equal shares {longest(costs, even):.3g} s"
            )
        reporter.say(text)
        reporter.note("balance", note)


class _Alone:
    """A step's gradients of this process's island, on its devices alone: nothing is exchanged."""

    def __init__(self, trainer: Trainer, tokens: npt.NDArray[np.int32], own: Sequence[int]) -> None:
        """The gradients of microbatches, each `tokens` [rows, positions + 1].

        `own` are the positions of this island on the axis `data`.
        """
        mesh = trainer.mesh
        devices = np.take(mesh.devices, own, axis=mesh.axis_names.index(AXIS))
        self._mesh = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        gradients = functools.partial(value_and_grad_of_shares, trainer.loss, trainer.parts)
        self._gradients = jaxhet.jit(gradients)
        self._tokens = np.broadcast_to(tokens, (len(own), _MANY, *tokens.shape))

    def measure(self, params: Params) -> Cost:
        """Medians of several turns, after one that compiles."""
        own = jax.tree.map(self._own, params)
        split = activation_sharding("shares", self._mesh)
        shares = jax.make_array_from_callback(
            self._tokens.shape, split, lambda index: self._tokens[index]
        )
        times: dict[int, list[float]] = {_FEW: [], _MANY: []}
        with jax.set_mesh(self._mesh):
            for _ in range(_REPEATS + 1):
                for count, measured in times.items():
                    counts = np.full(len(self._tokens), count, np.int32)
                    begin = time.perf_counter()
                    jaxhet.block_until_ready(self._gradients(own, shares, counts))
                    measured.append(time.perf_counter() - begin)
        return fit({count: statistics.median(measured[1:]) for count, measured in times.items()})

    def _own(self, x: jax.Array) -> jax.Array:
        """This island's replica of a parameter: the same memory."""
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(self._mesh, x.sharding.spec)
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _position(mesh: jax.sharding.Mesh, device: Any) -> int:
    """The position of a device along the axis `data`."""
    (place,) = np.argwhere(np.vectorize(lambda d: d.id == device.id)(mesh.devices))
    return int(place[mesh.axis_names.index(AXIS)])


def _islands_of_positions(mesh: jax.sharding.Mesh, islands: Sequence[jaxhet.Island]) -> list[str]:
    """The name of the island of each position of the axis `data`.

    Raises:
      ValueError: A position has devices of several islands.
    """
    name_of = {d.id: island.name for island in islands for d in island.devices}
    by_position = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), 0)
    by_position = by_position.reshape(len(by_position), -1)
    names = []
    for devices in by_position:
        found = sorted({name_of.get(d.id, "the island") for d in devices})
        if len(found) > 1:
            raise ValueError(
                f"--balance: a position of the mesh axis {AXIS} has devices of {', '.join(found)}: "
                f"choose a mesh whose other axes stay inside an island, such as {AXIS}=2,fsdp=-1."
            )
        names += found
    return names
