"""Pretrains a LLaMA on text: `python -m models.pretrain --help`.

Alone it uses the devices of its own process; under `jaxhet launch` those of the whole job.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxhet
from models.checkpoint import Checkpoints
from models.configs import CONFIGS, DTYPES, Config
from models.data import Batches, open_corpus
from models.reporter import Reporter, Settings
from models.sharding import AXES, activation_sharding, batch_axes
from models.train import Schedule, Trainer

PROGRAM = "python -m models.pretrain"

# What must be the same for a resumed run to go on exactly as if it had not stopped.
_FACTS = (
    "config",
    "seed",
    "batch",
    "seq",
    "permute",
    "stages",
    "learning_rate",
    "warmup",
    "weight_decay",
    "max_gradient_norm",
)


def _option(default: Any, text: str, **how: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **how})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; each field is also an option of the command line."""

    config: str = _option("demo", "size of the model", choices=tuple(CONFIGS))
    steps: int = _option(200, "steps in all, those before a resume included")
    seed: int = _option(0, "seed of parameters and batches")
    batch: int = _option(16, "rows in a batch, over all devices")
    seq: int = _option(128, "positions in a row, in bytes")
    mesh: str = _option("data=-1,model=1", "axes, outer one first; -1: all devices that are left")
    stages: str | None = _option(None, "layers of each pipeline stage, as 3,1; default: equal")
    microbatches: int = _option(4, "parts of a batch that go through the stages")
    permute: int = _option(0, "seed of another order of devices and rows; 0: the usual order")
    data: str | None = _option(None, "file to train on; default: Python's language reference")
    run_dir: str = _option("runs/pretrain", "folder for results, shared by all processes")
    resume: bool = _option(False, "go on from the newest checkpoint in the run folder, if any")
    checkpoint_every: int = _option(0, "steps between checkpoints; 0: only one at the end")
    learning_rate: float = _option(3e-3, "learning rate after the warm-up")
    warmup: int = _option(20, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "decoupled weight decay")
    max_gradient_norm: float = _option(1.0, "a larger global norm of gradients is scaled to this")
    dtype: str | None = _option(
        None, "type to compute in; default: the config's", choices=(*DTYPES,)
    )
    remat: bool | None = _option(
        None, "compute activations again in the backward pass; default: the config's"
    )
    update: str = _option(
        "auto",
        "where a parameter's update is computed: on each of its replicas, or each part of it on one"
        " device; auto: sharded if islands are unlike (jaxhet.unlike_islands)",
        choices=("auto", "sharded", "replicated"),
    )
    on_difference: str = _option(
        "warn", "what to do when replicas differ at a log line", choices=("warn", "sync", "raise")
    )
    log_every: int = _option(10, "steps between two log lines")
    digest: bool = _option(False, "write digests of all parameters at each logged step")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line; exits with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Pretrain a LLaMA on text, byte by byte.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Options):
        how: dict[str, Any] = {"default": field.default, **field.metadata}
        if field.type in (bool, bool | None):
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["type"] = field.type if isinstance(field.type, type) else str
        parser.add_argument("--" + field.name.replace("_", "-"), **how)
    options = Options(**vars(parser.parse_args(arguments)))
    for name in ("steps", "batch", "seq", "microbatches", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,model=2` as a dict; the axes are those of `models.sharding`, each at most once."""
    parts = [part.partition("=") for part in text.split(",")]
    axes = {name: int(size) for name, _, size in parts if size.removeprefix("-").isdigit()}
    if len(axes) < len(parts) or not axes.keys() <= set(AXES):
        raise ValueError(
            f"--mesh {text!r} is not of the form data=2,model=2, of axes {', '.join(AXES)}."
        )
    return axes


def make_mesh(options: Options) -> jax.sharding.Mesh:
    """The mesh of `--mesh`, its devices shuffled if `--permute` asks for it."""
    axes = parse_mesh(options.mesh)
    mesh = jaxhet.make_mesh(axes)
    if options.permute:
        order = np.random.default_rng(options.permute).permutation(mesh.devices.size)
        mesh = jaxhet.make_mesh(axes, devices=[mesh.devices.flat[i] for i in order])
    sizes = {name: mesh.shape[name] for name in batch_axes(mesh.shape)}
    if "stage" in mesh.shape:
        sizes["microbatches"] = options.microbatches
    if options.batch % math.prod(sizes.values()):
        split = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"--batch {options.batch} can't be split over {split}: choose a multiple of "
            f"{math.prod(sizes.values())}."
        )
    return mesh


def model_config(options: Options) -> Config:
    """The row of `CONFIGS` that the options name, with their dtype and pipeline."""
    config = CONFIGS[options.config]
    return dataclasses.replace(
        config,
        dtype=options.dtype or config.dtype,
        remat=config.remat if options.remat is None else options.remat,
        stages=parse_stages(options.stages),
        microbatches=options.microbatches,
    )


def parse_stages(text: str | None) -> tuple[int, ...]:
    """`3,1` as a tuple of the layers of each stage; empty for None."""
    parts = text.split(",") if text else []
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--stages {text!r} is not of the form 3,1.")
    return tuple(int(part) for part in parts)


def make_trainer(options: Options) -> Trainer:
    """What trains the model that `options` describe, on all devices of the job."""
    schedule = Schedule(
        options.learning_rate, options.warmup, options.weight_decay, options.max_gradient_norm
    )
    mesh = make_mesh(options)
    return Trainer(model_config(options), schedule, mesh, update_axes(options.update, mesh))


def update_axes(update: str, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes to split the update over: those that split the batch, and those that cross islands.

    None for a replicated update.
    """
    islands = jaxhet.islands() if _in_job() else ()
    if update == "replicated" or (update == "auto" and not (islands and jaxhet.unlike_islands())):
        return ()
    island_of = {d.id: island.index for island in islands for d in island.devices}
    places = np.vectorize(lambda d: island_of.get(d.id, 0), otypes=[int])(mesh.devices)
    crossing = [
        name
        for axis, name in enumerate(mesh.axis_names)
        if np.any(places != np.take(places, [0], axis=axis))
    ]
    return tuple(n for n in mesh.axis_names if n in crossing or n in batch_axes(mesh.shape))


def pretrain(options: Options) -> None:
    """Runs the training that `options` describe."""
    trainer = make_trainer(options)
    corpus = open_corpus(options.data)
    batches = Batches(corpus, options.seed, options.batch, options.seq, options.permute)
    facts = {name: getattr(options, name) for name in _FACTS}
    facts |= {"corpus": corpus.identity, "dtype": trainer.config.dtype}
    folder = Path(options.run_dir)
    with Checkpoints(folder / "checkpoints", facts) as checkpoints, jax.set_mesh(trainer.mesh):
        _train(options, trainer, batches, checkpoints)


def _train(options: Options, trainer: Trainer, batches: Batches, checkpoints: Checkpoints) -> None:
    init, update = trainer.compile(jaxhet.jit)
    start = _first_step(options, checkpoints)
    if start:
        shapes = jax.eval_shape(lambda: trainer.init(options.seed))
        state = checkpoints.restore(start, shapes, trainer.state_shardings())
    else:
        state = init(options.seed)
    state = jaxhet.sync_replicas(state)
    reporter = Reporter(_reporter_settings(options, start))
    if trainer.update_axes:
        reporter.say(f"the update is split over {', '.join(trainer.update_axes)}")
    reporter.digest(start, state.params)
    sharding = activation_sharding("tokens", trainer.mesh)
    for step in range(start, options.steps):
        state, measures = update(state, batches(step, sharding))
        if reporter.step(measures):
            state = reporter.report(state, options.on_difference)
        done, every = step + 1, options.checkpoint_every
        if done == options.steps or (every and done % every == 0):
            checkpoints.save(done, state)
    reporter.finish()


def _first_step(options: Options, checkpoints: Checkpoints) -> int:
    latest = checkpoints.latest_step() or 0
    if latest and not options.resume:
        raise ValueError(
            f"{options.run_dir} holds a run of {latest} steps: give --resume to go on with it, or "
            "another --run-dir."
        )
    return latest


def _reporter_settings(options: Options, start: int) -> Settings:
    return Settings(
        run_dir=Path(options.run_dir),
        start=start,
        steps=options.steps,
        log_every=options.log_every,
        tokens_per_step=options.batch * options.seq,
        digest=options.digest,
        counters=jaxhet.stats if _in_job() else dict,
    )


def _in_job() -> bool:
    """Whether this process was started as one of a job, by `jaxhet launch` or like it."""
    return "JAXHET_COORDINATOR_ADDRESS" in os.environ


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with one line of text for an input that can't be used."""
    options = parse(arguments)
    if _in_job():
        jaxhet.initialize()
    try:
        pretrain(options)
    except (
        ValueError,
        OSError,
        FloatingPointError,
        jaxhet.UsageError,
        jaxhet.ReplicaError,
    ) as error:
        sys.exit(f"{PROGRAM}: {error}")
    if _in_job():
        jaxhet.shutdown()


if __name__ == "__main__":
    main()
