"""Pretrains a LLaMA or Qwen on text: `python -m models.pretrain --help`.

Alone it uses the devices of its own process; under `jaxhet launch` those of the whole job.
"""

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxhet
from models import huggingface
from models.attention import all_nvidia
from models.configs import Config
from models.data import Batches
from models.extras import diloco, initial, staged
from models.extras.accumulate import Accumulation
from models.extras.agreement import Agreement, agreed, first_rows
from models.extras.balance import Balance
from models.extras.checkpoint import LAYOUT, Checkpoints
from models.extras.corpus import Corpus, open_corpus
from models.extras.flops import config_flops, peak_flops
from models.extras.loop import Run, Stopped
from models.extras.options import PROGRAM, Options, parse
from models.extras.pipeline import AUTO, parse_stages
from models.extras.quiet import hide_reports_of_saves
from models.extras.reporter import Reporter, Settings
from models.extras.shares import parse_parts
from models.sharding import AXES, batch_axes, token_axes
from models.train import Schedule, Trainer

# Facts that a resumed run must share to continue exactly as if it had not stopped.
_FACTS = (
    "config",
    "init_from",
    "seed",
    "batch",
    "seq",
    "permute",
    "accumulate",
    "order",
    "learning_rate",
    "warmup",
    "weight_decay",
    "max_gradient_norm",
)
# Options that replace a field of the config, if they are given.
_MODEL = ("dtype", "param_dtype", "logits_dtype", "attention", "remat", "loss_chunk", "pipeline")
_NO_STAGE = (
    "--stages {options.stages} on --mesh {options.mesh}, which has no axis stage: give a mesh such"
    " as stage=2,data=-1, or leave out --stages."
)


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,model=2` as a dict; the axes are those of `models.sharding`, each at most once.

    Raises:
      ValueError: The text has another form or an unknown axis.
    """
    parts = [part.partition("=") for part in text.split(",")]
    axes = {name: int(size) for name, _, size in parts if size.removeprefix("-").isdigit()}
    if len(axes) < len(parts) or not axes.keys() <= set(AXES):
        raise ValueError(
            f"--mesh {text!r} is not of the form data=2,model=2, of axes {', '.join(AXES)}."
        )
    return axes


def make_mesh(options: Options) -> jax.sharding.Mesh:
    """The mesh of `--mesh`, its devices shuffled if `--permute` asks for it.

    Raises:
      ValueError: The mesh can't split the batch.
    """
    axes = parse_mesh(options.mesh)
    mesh = jaxhet.make_mesh(axes)
    if options.permute:
        order = np.random.default_rng(options.permute).permutation(mesh.devices.size)
        mesh = jaxhet.make_mesh(axes, devices=[mesh.devices.flat[i] for i in order])
    sizes = {name: mesh.shape[name] for name in batch_axes(mesh.shape)}
    if "stage" in mesh.shape:
        sizes["microbatches"] = options.microbatches
    if options.accumulate > 1:
        sizes["accumulate"] = options.accumulate
    if options.batch % math.prod(sizes.values()):
        split = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"--batch {options.batch} can't be split over {split}: choose a multiple of "
            f"{math.prod(sizes.values())}."
        )
    return mesh


def model_config(options: Options, vocab: int) -> Config:
    """The config that the options name, with their types and pipeline.

    Its vocabulary has room for tokens below `vocab`.
    """
    return dataclasses.replace(
        initial.config(options, vocab),
        stages=parse_stages(options.stages),
        microbatches=options.microbatches,
        **_given(options),
    )


def _given(options: Options) -> dict[str, Any]:
    """The fields of the config that the options replace."""
    given = {name: getattr(options, name) for name in _MODEL}
    return {name: value for name, value in given.items() if value is not None}


def make_trainer(options: Options, corpus: Corpus | None = None) -> Trainer:
    """The trainer of the model that `options` describe, on all devices of the job.

    Args:
      options: Options of the run.
      corpus: The training data; None: the data that the options name.

    Raises:
      ValueError: The options don't fit together, or the devices don't have what they ask for.
    """
    schedule = Schedule(
        options.learning_rate,
        options.warmup,
        options.weight_decay,
        options.max_gradient_norm,
        options.decay_steps,
        options.moments_dtype,
    )
    mesh = make_mesh(options)
    corpus = corpus or open_corpus(options.data, initial.tokenizer(options))
    config = model_config(options, corpus.vocab)
    if config.stages and "stage" not in mesh.shape:
        raise ValueError(_NO_STAGE.format(options=options))
    apart = diloco.chosen(options, mesh, crossing_axes(mesh))
    trainer = Trainer(
        dataclasses.replace(config, document_end=_document_end(options, corpus)),
        schedule,
        mesh,
        () if apart else update_axes(options.update, mesh),
        Accumulation(options.accumulate, () if apart else sum_axes(mesh)),
        parse_parts(options),
        apart,
    )
    if config.attention == "cudnn" and not all_nvidia():
        raise ValueError("--attention cudnn needs NVIDIA GPUs on all islands: choose auto or xla.")
    return trainer


def _document_end(options: Options, corpus: Corpus) -> int | None:
    """The token that ends documents, if they are to be kept apart."""
    if not options.document_mask:
        return None
    if corpus.end is None:
        raise ValueError(
            f"--document-mask needs a token after each document, and {corpus.name} has none: give "
            "a --tokenizer with such a token, or leave out --document-mask."
        )
    return corpus.end


def update_axes(update: str, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes to split the update over: those that split tokens, and those that cross islands.

    None for a replicated update.
    """
    islands = jaxhet.islands() if in_job() else ()
    if update == "replicated" or (update == "auto" and not (islands and jaxhet.unlike_islands())):
        return ()
    crossing = crossing_axes(mesh)
    return tuple(n for n in mesh.axis_names if n in crossing or n in token_axes(mesh.shape))


def sum_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes over which the gradients of a batch's parts are summed once.

    They are `data`, and `fsdp` if it crosses islands. `expert` and `sequence` are not among them:
    each part of a batch communicates over these axes anyway (tokens, or keys and values).
    """
    axes = ("data", "fsdp") if "fsdp" in crossing_axes(mesh) else ("data",)
    return tuple(name for name in axes if name in mesh.shape)


def crossing_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes along which neighbours are in different islands; none outside of a job."""
    islands = jaxhet.islands() if in_job() else ()
    island_of = {d.id: island.index for island in islands for d in island.devices}
    places = np.vectorize(lambda d: island_of.get(d.id, 0), otypes=[int])(mesh.devices)
    return tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if np.any(places != np.take(places, [0], axis=axis))
    )


def pretrain(options: Options) -> None:
    """Runs the training that `options` describe."""
    corpus = open_corpus(options.data, initial.tokenizer(options))
    chosen = _choose_stages(options, corpus) if options.stages == AUTO else None
    if chosen:
        options = dataclasses.replace(options, stages=",".join(map(str, chosen.layers)))
    trainer = make_trainer(options, corpus)
    held_out = options.eval_part if options.eval_every else 0.0
    kept, evaluated = corpus.split(held_out)
    sizes = (options.batch, options.seq, options.permute)
    facts = {name: getattr(options, name) for name in _FACTS} | {
        "corpus": corpus.identity,
        LAYOUT: options.stages,
        **_given(options),
        "dtype": trainer.config.dtype,
        "eval_part": held_out,
        "cosine_steps": options.decay_steps,
        **({"document_mask": True} if options.document_mask else {}),
        **diloco.facts(trainer.diloco, trainer.mesh),
    }
    batches = Batches(kept, options.seed, *sizes, options.order)
    evaluation = Batches(evaluated, options.seed, *sizes) if held_out else None
    islands = jaxhet.islands() if in_job() else ()
    balance = Balance(options, trainer, batches, islands) if options.balance else None
    unit = "token" if corpus.tokenizer else "byte"
    agreement = Agreement()
    agreement.require(agreed(options, corpus, trainer))
    agreement.require_shared(Path(options.run_dir))
    folder = Path(options.run_dir) / huggingface.CHECKPOINTS
    with Checkpoints(folder, facts, options.keep) as checkpoints, jax.set_mesh(trainer.mesh):
        run = Run(options, trainer, batches, evaluation, checkpoints, balance)
        start = run.first_step()
        agreement.require(first_rows(start, batches))
        if jax.process_index() == 0:
            options.save(Path(options.run_dir))
        reporter = Reporter(_reporter_settings(options, trainer, start, unit))
        if chosen:
            reporter.say(chosen.why)
            reporter.note("stages", dataclasses.asdict(chosen))
        run.train(start, reporter)


def _choose_stages(options: Options, corpus: Corpus) -> staged.Stages:
    """The stages of `--stages auto`."""
    trainer = make_trainer(dataclasses.replace(options, stages=None), corpus)
    if "stage" not in trainer.mesh.shape:
        raise ValueError(_NO_STAGE.format(options=options))
    batches = Batches(corpus, options.seed, options.batch, options.seq)
    tokens = batches.rows(0, 0, options.batch // options.microbatches)
    return staged.choose(trainer.config, trainer.schedule, trainer.mesh, tokens)


def _reporter_settings(options: Options, trainer: Trainer, start: int, unit: str) -> Settings:
    devices = trainer.mesh.devices
    peak = options.peak_flops or peak_flops(devices.flat[0].device_kind, trainer.config.dtype)
    return Settings(
        run_dir=Path(options.run_dir),
        start=start,
        steps=options.steps,
        log_every=options.log_every,
        tokens_per_step=options.batch * options.seq,
        digest=options.digest,
        counters=jaxhet.stats if in_job() else dict,
        flops=config_flops(trainer.config, options.batch * options.seq, options.seq),
        peak_flops=peak * devices.size if peak else None,
        unit=unit,
        **({"gathered": diloco.Gathered(trainer.mesh)} if trainer.diloco else {}),
    )


def in_job() -> bool:
    """Whether this process was started as one of a job: by `jaxhet launch`, or by a scheduler.

    A scheduler's own variables do not say so: the program may be one of many that run alone.
    """
    return not os.environ.keys().isdisjoint(
        ("JAXHET_COORDINATOR_ADDRESS", "JAXHET_JOB_SECRET_FILE")
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Exits with one line of text for an input that can't be used; and with 128 + SIGTERM after that
    signal, when the state is saved.
    """
    options = parse(arguments)
    code = 0
    if in_job():
        if options.wire:
            jaxhet.initialize(wire=options.wire)
        else:
            jaxhet.initialize()
    try:
        pretrain(options)
    except Stopped as stopped:
        print(f"{PROGRAM}: {stopped}", file=sys.stderr)
        code = 128 + signal.SIGTERM
    except (
        ValueError,
        OSError,
        FloatingPointError,
        jaxhet.UsageError,
        jaxhet.ReplicaError,
    ) as error:
        sys.exit(f"{PROGRAM}: {error}")
    if in_job():
        jaxhet.shutdown()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    hide_reports_of_saves()
    main()
