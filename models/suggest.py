"""Suggests meshes and shares for the islands of a job, the fastest first.

    jaxhet launch --islands 2 --devices 2 -- python -m models.suggest --config demo --batch 32

Each island takes steps alone, for each mesh axis that its devices could lie along. An all-reduce of
two sizes gives rate and latency of the link. The steps of all candidates are compiled, and tell
what they exchange (`jaxhet.plan`) and what memory they need. `--try 3` then trains the first three
for a few steps, and prints what was measured beside what was predicted.

The other options are those of `models.pretrain`. A batch is cut into `--accumulate` microbatches
(default 4) for each position of the axis `data`, and likewise in pipelines.
"""

import argparse
import ctypes
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from models.data import Batches
from models.extras import initial, staged
from models.extras.balance import Balance
from models.extras.candidates import INNER, Alone, Candidate, Suggestion, candidates, mesh, ranked
from models.extras.corpus import Corpus, open_corpus
from models.extras.options import Options, parse
from models.extras.shares import Cost, fit, num_microbatches
from models.pretrain import make_trainer
from models.sharding import activation_sharding
from models.train import Trainer

_PROGRAM = "python -m models.suggest"
_REPEATS = 5
_MICROBATCHES = 4
_LINK_BYTES = (4, 1 << 22)  # an operand of each device


@dataclasses.dataclass(frozen=True)
class Planner:
    """A plan for a model on the islands of a job."""

    options: Options
    corpus: Corpus
    islands: tuple[jaxhet.Island, ...]
    compiled: dict[str, tuple[Trainer, Any]] = dataclasses.field(default_factory=dict)

    @property
    def _devices(self) -> int:
        return len(self.islands[0].devices)

    def suggestions(self) -> list[Suggestion]:
        """All candidates that the devices can run, ranked."""
        found = [each for inner in self._inner() for each in self._on(inner)]
        rate, latency = link()
        suggested = []
        for candidate, beside in found:
            try:
                compiled = self.compile(candidate)[1]
            except ValueError as error:
                _say(f"left out {candidate.words}: {error}")
                continue
            exposed_s = jaxhet.plan(compiled).exposed_seconds(rate, latency)
            num_bytes = beside + _num_bytes(compiled)
            suggested.append(Suggestion(candidate, exposed_s, num_bytes))
        limits = [(d.memory_stats() or {}).get("bytes_limit", 0) for d in jax.local_devices()]
        room = int(np.min(process_allgather(np.int64(min(limits)))))
        return ranked(suggested, room or None)

    def compile(self, candidate: Candidate) -> tuple[Trainer, Any]:
        """The trainer of a candidate, and its step."""
        if candidate.words not in self.compiled:
            options = dataclasses.replace(self.options, **candidate.options)
            trainer = make_trainer(options, self.corpus)
            parts = num_microbatches(options, trainer.mesh)
            lowered = trainer.lower(jaxhet.jit, options.batch, options.seq, parts)
            self.compiled[candidate.words] = trainer, lowered.compile()
        return self.compiled[candidate.words]

    def tried(self, suggestion: Suggestion) -> Suggestion:
        """The suggestion with the measured times of its steps."""
        options = dataclasses.replace(self.options, **suggestion.candidate.options)
        trainer, step = self.compile(suggestion.candidate)
        batches = Batches(self.corpus, options.seed, options.batch, options.seq)
        if options.balance:
            inputs = Balance(options, trainer, batches, self.islands).inputs(0)
        else:
            inputs = (batches(0, activation_sharding("tokens", trainer.mesh)),)
        with jax.set_mesh(trainer.mesh):
            init = trainer.compile(jaxhet.jit)[0].lower(0).compile()
            memory = _Memory()
            state = [init()]

            def run() -> Any:
                state[0], measures = step(state[0], *inputs)
                return measures

            seconds = _slowest(_seconds(run))
        return dataclasses.replace(
            suggestion, measured_seconds=seconds, measured_bytes=memory.of_device()
        )

    def _inner(self) -> tuple[str, ...]:
        return INNER if self._devices > 1 else INNER[:1]

    def _on(self, inner: str) -> list[tuple[Candidate, int]]:
        """Candidates whose axis `inner` lies in islands; bytes that XLA does not allocate."""
        try:
            alone, beside = self._alone(inner)
        except ValueError as error:
            _say(f"left out {inner}={self._devices} inside of islands: {error}")
            return []
        config = make_trainer(self._local(inner), self.corpus).config
        found = candidates(config, inner, self._devices, self.options.accumulate, alone)
        return [(each, beside) for each in found]

    def _local(self, inner: str) -> Options:
        """Options of a whole job with the model of a single island."""
        num = len(self.islands)
        return dataclasses.replace(self.options, mesh=mesh("data", num, inner, self._devices))

    def _alone(self, inner: str) -> tuple[Alone, int]:
        """Times of all islands, each alone, at the same time; and `_step`'s bytes."""
        trainer = make_trainer(self._local(inner), self.corpus)
        place = next(
            i for i, each in enumerate(self.islands) if jax.process_index() in each.processes
        )
        shape = (1, self._devices)
        own = np.array(self.islands[place].devices).reshape(shape if inner != "data" else shape[1:])
        axes = ("data", inner)[: own.ndim]
        alone = dataclasses.replace(trainer, mesh=Mesh(own, axes), update_axes=())
        found = np.zeros((len(self.islands), 6), np.float32)
        cost, beside = self._step(alone)
        found[place, :3] = cost.microbatch, cost.fixed, beside
        num = len(self.islands)
        if trainer.config.layers >= num:
            rows = self.options.batch // (self.options.accumulate * num)
            tokens = Batches(self.corpus, 0, rows, self.options.seq).rows(0, 0, rows)
            line = Mesh(own.reshape(-1), (inner,))
            found[place, 3:] = staged.costs(trainer.config, trainer.schedule, line, tokens)
        found = np.max(process_allgather(found), axis=0)
        steps = [Cost(*map(float, row[:2])) for row in found]
        times = Alone(steps, found[:, 3:] if trainer.config.layers >= num else None)
        return times, int(np.max(found[:, 2]))

    def _step(self, trainer: Trainer) -> tuple[Cost, int]:
        """The cost of a whole step of an island, and bytes of a device that XLA does not tell.

        On a CPU these are in the process: threads, and operands in another layout.
        """
        positions, most = trainer.mesh.shape["data"], self.options.accumulate
        batch = self.options.batch // len(self.islands)
        batches = Batches(self.corpus, 0, batch, self.options.seq)
        rows = batch // (positions * most)
        sharding = activation_sharding("shares", trainer.mesh)
        tokens = batches.shares(0, (most,) * positions, (most, rows), sharding)
        init, step = trainer.compile(jaxhet.jit)
        with jax.set_mesh(trainer.mesh):
            first = init.lower(0).compile()
            counts = {count: np.full(positions, count, np.int32) for count in (1, most)}
            shapes = jax.eval_shape(first), trainer.state_shardings()
            state = jax.tree.map(
                lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), *shapes
            )
            compiled = step.lower(state, tokens, counts[1]).compile()
            state: list[Any] = [first()]

            def run(count: int) -> Any:
                state[0], measures = compiled(state[0], tokens, counts[count])
                return measures

            jaxhet.block_until_ready(run(1))  # a process grows when it first runs a program
            state.clear()
            memory = _Memory()
            state.append(first())
            cost = fit({count: _seconds(lambda k=count: run(k)) for count in counts})
        found = memory.of_device()
        return cost, max(found - _num_bytes(compiled), 0) if memory.is_host else 0


def link() -> tuple[float, float]:
    """Rate in GB/s of a device's link to other islands, and microseconds of an exchange."""
    devices = jaxhet.make_mesh({"data": -1})
    points = []
    for num_bytes in _LINK_BYTES:
        x = jax.device_put(jnp.ones(num_bytes // 4), NamedSharding(devices, P()))
        program = jaxhet.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "data"), mesh=devices, in_specs=P(), out_specs=P()
            )
        )
        plan = jaxhet.plan(program, x)
        seconds = _slowest(_seconds(lambda p=program, x=x: p(x)))
        points.append((plan.bytes_per_step, seconds, plan.exchanges_per_step))
    (few, short, exchanges), (many, long, _) = points
    return (many - few) / max(long - short, 1e-9) / 1e9, short / max(exchanges, 1) * 1e6


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of several runs, after one that compiles and one beside the other islands."""
    jaxhet.block_until_ready(run())
    process_allgather(np.int32(0))
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jaxhet.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _num_bytes(compiled: Any) -> int:
    """Bytes of a device for arguments, results and the rest of a program, by XLA's analysis."""
    memory = compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return num_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _slowest(seconds: float) -> float:
    return float(np.max(process_allgather(np.float32(seconds))))


class _Memory:
    """The memory that a process's devices use from now on."""

    def __init__(self) -> None:
        self.is_host = jax.local_devices()[0].memory_stats() is None
        self._before = 0
        if self.is_host:
            ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again, unnoticed
            Path("/proc/self/clear_refs").write_text("5")  # a new peak begins (proc(5))
            self._before = self._peak()

    def of_device(self) -> int:
        """Mean of this process's devices; on a GPU, the peak since the process began."""
        num = len(jax.local_devices())
        if self.is_host:
            return (self._peak() - self._before) // num
        return max(d.memory_stats()["peak_bytes_in_use"] for d in jax.local_devices())

    def _peak(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def table(found: Sequence[Suggestion]) -> str:
    """The suggestions as lines, best first: predicted and measured values, and the difference."""
    lines = ["step, ms: predicted  measured  error   MB of a device  measured  error   options"]
    for s in found:
        seconds = f"{1e3 * s.seconds:19.1f}  {_beside(s.seconds, s.measured_seconds, 1e3)}"
        memory = f"{s.num_bytes / 1e6:14.1f}  {_beside(s.num_bytes, s.measured_bytes, 1e-6)}"
        lines.append(f"{seconds}   {memory}   {s.candidate.words}")
    return "\n".join([*lines, *_judged(found)])


def _beside(predicted: float, measured: float | None, scale: float) -> str:
    """A measured value, and the relative error of its prediction."""
    if not measured:
        return f"{'-':>8}  {'-':>5}"
    return f"{scale * measured:8.1f}  {predicted / measured - 1:+5.0%}"


def _judged(found: Sequence[Suggestion]) -> list[str]:
    """A line of the largest errors of the tried suggestions, beside their aims."""
    tried = [s for s in found if s.measured_seconds]
    if len(tried) < 2:
        return []
    seconds = [(s.seconds, s.measured_seconds or 0) for s in tried]
    num_bytes = [(s.num_bytes, s.measured_bytes) for s in tried if s.measured_bytes]
    times = [measured for _, measured in seconds]
    slower = min(times[:3]) / min(times) - 1
    memory = f"memory {_largest_error(num_bytes):.0%} (10%), " if num_bytes else ""
    return [
        f"largest errors (aims): step {_largest_error(seconds):.0%} (15%), {memory}best of the "
        f"first three {slower:.0%} slower than the best of all {len(times)} (5%)"
    ]


def _largest_error(pairs: Sequence[tuple[float, float]]) -> float:
    return max(abs(predicted / measured - 1) for predicted, measured in pairs)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def main() -> None:
    """The command line.

    Raises:
      ValueError: The job has one island, or islands of several sizes; it ends the program in words.
    """
    parser = argparse.ArgumentParser(prog=_PROGRAM, allow_abbrev=False, epilog=__doc__)
    parser.add_argument("--try", dest="tries", type=int, default=0, help="number to train")
    parser.add_argument("--json", type=Path, help="file for the table")
    given, words = parser.parse_known_args()
    options = parse(words)
    parts = options.accumulate if options.accumulate > 1 else _MICROBATCHES
    options = dataclasses.replace(options, accumulate=parts, balance=None, stages=None)
    jaxhet.initialize()
    islands = jaxhet.islands()
    try:
        if len({len(island.devices) for island in islands}) != 1 or len(islands) < 2:
            sizes = ", ".join(f"{each.name} {len(each.devices)}" for each in islands)
            raise ValueError(
                f"numbers of devices of the islands: {sizes}. Start two or more islands of equal "
                "size (jaxhet launch --islands 2)."
            )
        corpus = open_corpus(options.data, initial.tokenizer(options))
        planner = Planner(options, corpus, tuple(islands))
        found = planner.suggestions()
        found[: given.tries] = map(planner.tried, found[: given.tries])
    except (ValueError, OSError, jaxhet.UsageError) as error:
        sys.exit(f"{_PROGRAM}: {error}")
    _say(table(found))
    if given.json and jax.process_index() == 0:
        given.json.write_text(json.dumps([dataclasses.asdict(s) for s in found], indent=1) + "\n")
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
