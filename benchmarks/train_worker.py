"""One process of the benchmarks of training: builds a step, times it, runs it and writes digests.

Requests are pairs of a name in `_ANSWERS` and its arguments.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from benchmarks import collective_cases, plain_llama
from benchmarks.on_devices import facts, peak_bytes
from benchmarks.training import PLAIN, Built, Program, Trace
from jaxhet import testing
from models.configs import CONFIGS
from models.data import Batches
from models.extras.ahead import wait_for_earlier
from models.extras.corpus import open_corpus
from models.extras.flops import config_flops, model_flops
from models.extras.records import Journal, digest_rows
from models.sharding import activation_sharding
from models.train import Schedule, Trainer, TrainState

_IS_BRIDGED = "JAXHET_PROCESS_ID" in os.environ  # else one world, which jaxhet has not joined
_DIFFERENT_BATCHES = 4
_WARM_UP = 2


class _Passes:
    """Begin and end of each hook that changes a module, also of hooks that others register."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[float, float]] = {}  # the last one of each stage

    def watch(self) -> None:
        """Begins to record; call it before jaxhet registers its passes."""
        register = xla.register_hlo_module_transformation

        def watched(hook: Callable[[bytes], bytes | None], **how: Any) -> None:
            def run(module: bytes) -> bytes | None:
                start = time.perf_counter()
                if (result := hook(module)) is not None:
                    self.spans[how["stage"].name] = (start, time.perf_counter())
                return result

            register(run, **how)

        xla.register_hlo_module_transformation = watched

    def of_compile(self, end: float) -> dict[str, float]:
        """The parts of a compilation that ended at `end`, as fields of `Built`."""
        pre, post = self.spans.get("PRE_SCHEDULER"), self.spans.get("POST_SCHEDULER")
        if pre is None or post is None:
            return {}
        return {
            "pre_s": pre[1] - pre[0],
            "post_s": post[1] - post[0],
            "between_s": post[0] - pre[1],
            "after_s": end - post[1],
        }


_passes = _Passes()


class _Step:
    """A compiled training step with its state and batches."""

    def __init__(self, program: Program, devices: Any = None):
        self.program = program
        make = _PlainTrainer if program.config in PLAIN else _model_trainer
        self._trainer: _PlainTrainer | _ModelTrainer = make(program, devices)
        start = time.perf_counter()
        lowered = self._trainer.lower(jaxhet.jit, program.batch, program.seq)
        _passes.spans.clear()
        traced = time.perf_counter()
        self._step = lowered.compile()
        end = time.perf_counter()
        self.exchanges = jaxhet.plan(self._step).exchanges if _IS_BRIDGED else ()
        self.built = Built(
            traced - start,
            end - traced,
            **_passes.of_compile(end),
            **_sums(self.exchanges),
            flops=self._trainer.flops(program),
        )
        self._batches = _batches(program)
        self._sharding = activation_sharding("tokens", self._trainer.mesh)
        with jax.set_mesh(self._trainer.mesh):
            self._state = self._trainer.compile(jaxhet.jit)[0](0)
        self._few = [self._batches(i, self._sharding) for i in range(_DIFFERENT_BATCHES)]

    def seconds_per_step(self, steps: int) -> tuple[float, float]:
        """Mean time of a step on prepared batches, and the last loss."""
        start = time.perf_counter()
        losses = [self._advance(self._few[i % _DIFFERENT_BATCHES]) for i in range(steps)]
        jaxhet.block_until_ready(losses)
        return (time.perf_counter() - start) / steps, float(losses[-1])

    def train(self, first: int, steps: int) -> list[float]:
        """Steps on the batches from `first` on; their losses."""
        losses: list[jax.Array] = []
        for step in range(first, first + steps):
            losses.append(self._advance(self._batches(step, self._sharding)))
            wait_for_earlier(losses)
        return [float(loss) for loss in jaxhet.block_until_ready(losses)]

    def traced(self, first: int, steps: int) -> tuple[list[float], list[float]]:
        """Steps on the batches from `first` on: the seconds and the loss of each.

        The next batch is made while a step is under way.
        """
        tokens = jax.block_until_ready(self._batches(first, self._sharding))
        losses, times = [], [time.perf_counter()]
        for step in range(first, first + steps):
            loss = self._advance(tokens)
            tokens = self._batches(step + 1, self._sharding)
            losses.append(float(jaxhet.block_until_ready(loss)))
            times.append(time.perf_counter())
        return np.diff(times).tolist(), losses

    def digests(self, step: int) -> list[dict[str, Any]]:
        """Digests of this process's parameters now, after `step` steps."""
        return digest_rows(step, self._trainer.params_of(self._state))

    def _advance(self, tokens: jax.Array) -> jax.Array:
        self._state, measures = self._step(self._state, tokens)
        return self._trainer.loss_of(measures)


class _ModelTrainer(Trainer):
    """A program of models/, as a `_Step`."""

    def params_of(self, state: TrainState) -> Any:
        """The parameters in a state."""
        return state.params

    def loss_of(self, measures: dict[str, jax.Array]) -> jax.Array:
        """The loss in what a step returns beside the state."""
        return measures["loss"]

    def flops(self, program: Program) -> float:
        """FLOPs of a step, over all devices."""
        return config_flops(self.config, program.tokens, program.seq)


class _PlainTrainer:
    """benchmarks/plain_llama.py with the methods of `_ModelTrainer`."""

    def __init__(self, program: Program, devices: Any):
        tiny = {"layers": 2, "embed": 64, "heads": 2, "hidden": 96, "vocab": 256}
        fields: dict[str, Any] = tiny if program.config == "plain-tiny" else {}
        if program.layers:
            fields["layers"] = program.layers
        is_large = jax.default_backend() == "gpu" and program.config != "plain-tiny"
        attention = "cudnn" if is_large else None
        self.mesh = jaxhet.make_mesh(program.axes, devices=devices)
        rows = NamedSharding(self.mesh, P(self.mesh.axis_names))
        fields["rows"] = None if program.config == "plain-features" else rows
        self.size = plain_llama.Size(**fields, scan=program.scan, attention=attention)
        self._shardings = plain_llama.shardings(self.size, self.mesh)

    def lower(self, jit: Callable[..., Any], batch: int, seq: int) -> Any:
        """The step as the user's script has it: by `jax.jit`."""
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: plain_llama.init(self.size, jax.random.key(0))),
            self._shardings,
        )
        split = activation_sharding("tokens", self.mesh)
        tokens = jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32, sharding=split)
        return self.compile(jit)[1].lower(state, tokens)

    def compile(self, jit: Callable[..., Any]) -> tuple[Any, Any]:
        """`init` and `step`."""
        del jit
        init = jax.jit(
            lambda: plain_llama.init(self.size, jax.random.key(0)), out_shardings=self._shardings
        )
        everywhere = NamedSharding(self.mesh, P())
        step = jax.jit(
            lambda state, tokens: plain_llama.train_step(self.size, state, tokens),
            donate_argnums=0,
            out_shardings=(self._shardings, everywhere),
        )
        return lambda seed: init(), step

    def params_of(self, state: tuple[Any, Any]) -> Any:
        """The parameters in a state."""
        return state[0]

    def loss_of(self, measures: jax.Array) -> jax.Array:
        """The loss in what a step returns beside the state."""
        return measures

    def flops(self, program: Program) -> float:
        """FLOPs of a step, over all devices."""
        size = self.size
        parameters = plain_llama.num_parameters(size) - size.vocab * size.embed  # in matrices
        head = size.embed // size.heads
        return model_flops(parameters, size.layers, size.heads, head, program.tokens, program.seq)


def _model_trainer(program: Program, devices: Any) -> _ModelTrainer:
    config = dataclasses.replace(
        CONFIGS[program.config],
        scan=program.scan,
        dtype=program.dtype,
        layers=program.layers or CONFIGS[program.config].layers,
    )
    mesh = jaxhet.make_mesh(program.axes, devices=devices)
    if program.permute:
        order = np.random.default_rng(program.permute).permutation(mesh.size)
        mesh = jaxhet.make_mesh(program.axes, devices=[mesh.devices.flat[i] for i in order])
    schedule = Schedule(program.learning_rate, 20, weight_decay=0.1, max_gradient_norm=1.0)
    return _ModelTrainer(config, schedule, mesh)


def _batches(program: Program) -> Batches:
    corpus = open_corpus(program.data)
    return Batches(corpus, 0, program.batch, program.seq, program.permute, program.order)


def _text(program: Program, steps: int) -> dict[str, Any]:
    """Name, size and SHA-256 of the training text, and how often so many steps read it."""
    batches = _batches(program)
    corpus = batches.corpus
    return {
        "text": corpus.name,
        "tokens": corpus.size,
        "sha256": corpus.digest(),
        "passes": batches.passes(steps),
    }


def _sums(exchanges: Sequence[jaxhet.PlannedExchange]) -> dict[str, Any]:
    num_bytes = sum(e.bytes_per_step for e in exchanges)
    apart = sum(e.bytes_per_step for e in exchanges if e.is_overlapped)
    return {
        "exchanges": sum(e.times or 1 for e in exchanges),
        "exchange_bytes": num_bytes,
        "apart": apart / num_bytes if num_bytes else 0.0,
    }


_steps: list[_Step] = []


def _build(program: Program) -> Built:
    """Compiles and warms up, and drops earlier programs."""
    _steps.clear()
    _steps.append(_Step(program))
    _steps[0].seconds_per_step(_WARM_UP)
    return _steps[0].built


def _time(steps: int) -> tuple[float, float, int]:
    """Seconds per step, the last loss, and the largest memory use of a device."""
    return (*_steps[0].seconds_per_step(steps), peak_bytes())


def _alone(program: Program, islands: int, steps: int) -> float:
    """Seconds of a step on one island alone, with equal work for each device.

    No byte crosses islands. In one world without jaxhet, an island is a process.
    """
    if not _steps or _steps[0].program != program.on_one_of(islands):
        _steps.clear()
        _steps.append(_Step(program.on_one_of(islands), _own_devices()))
        _steps[0].seconds_per_step(_WARM_UP)
    return _steps[0].seconds_per_step(steps)[0]


def _own_devices() -> Sequence[Any]:
    return _own_island().devices if _IS_BRIDGED else jax.local_devices()


def _own_island() -> jaxhet.Island:
    return next(i for i in jaxhet.islands() if jax.process_index() in i.processes)


def _begin(program: Program, on_own_island: bool) -> Built:
    """Compiles for all devices, or for the devices of the own island. Runs no step."""
    _steps.clear()
    _steps.append(_Step(program, _own_devices() if on_own_island else None))
    return _steps[0].built


def _trace(first: int, steps: int) -> Trace:
    """Runs steps of the program of `_begin`, from the one with index `first` on."""
    before = _counters()
    seconds, losses = _steps[0].traced(first, steps)
    grown = {name: value - before.get(name, 0) for name, value in _counters().items()}
    island = _own_island().index if _IS_BRIDGED else 0
    return Trace(island, seconds, losses, grown.pop("exchanges", 0), grown)


def _counters() -> dict[str, int]:
    """Number of started exchanges, and sent bytes by transport; empty in one world."""
    if not _IS_BRIDGED:
        return {}
    stats, prefix = jaxhet.stats(), "bytes_sent_"
    sent = {name.removeprefix(prefix): n for name, n in stats.items() if name.startswith(prefix)}
    return {"exchanges": stats["exchanges_started"], **sent}


def _exchanges_alone(repeats: int) -> float:
    """Seconds of the built step's exchanges without the step, one after the other.

    Each is a permute to the other island that sends as many bytes.
    """
    runs = [(max(e.num_bytes // 4, 1), e.times or 1) for e in _steps[0].exchanges]
    mesh = jaxhet.make_mesh({"x": -1})
    n = mesh.size
    pairs = [(i, (i + n // 2) % n) for i in range(n)]
    operands = {size: _zeros(mesh, size) for size in dict(runs)}

    def body(operands: dict[int, jax.Array]) -> jax.Array:
        def send(x: jax.Array) -> jax.Array:
            return jax.lax.ppermute(x, "x", pairs)

        links = [(send, operands[size]) for size, times in runs for _ in range(times)]
        return collective_cases.chained(links)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program = jax.jit(mapped)
    jax.block_until_ready(program(operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(operands))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _zeros(mesh: jax.sharding.Mesh, size: int) -> jax.Array:
    """`size` elements on each device."""
    shape, sharding = (mesh.size * size,), NamedSharding(mesh, P("x"))
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()


def _run(program: Program, steps: int, log_every: int, run_dir: pathlib.Path) -> list[float]:
    """Trains, and writes digests at the start and at logged steps; returns each step's loss."""
    _steps.clear()
    step = _Step(program)
    run_dir.mkdir(parents=True, exist_ok=True)
    journal = Journal(run_dir / f"digests-{jax.process_index()}.jsonl", 0)
    journal.append(step.digests(0))
    losses: list[float] = []
    while len(losses) < steps:
        losses += step.train(len(losses), min(log_every, steps - len(losses)))
        journal.append(step.digests(len(losses)))
    return losses


_ANSWERS: dict[str, Callable[..., Any]] = {
    "facts": facts,
    "build": _build,
    "time": _time,
    "alone": _alone,
    "exchanges_alone": _exchanges_alone,
    "begin": _begin,
    "trace": _trace,
    "text": _text,
    "run": _run,
}


def _answer(request: tuple[Any, ...]) -> Any:
    name, *arguments = request
    return _ANSWERS[name](*arguments)


if __name__ == "__main__":
    _passes.watch()
    testing.serve(_answer)
