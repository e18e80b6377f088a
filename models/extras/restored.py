"""Restores a checkpoint, also on a mesh with another number of pipeline stages."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from models.extras.checkpoint import Checkpoints
from models.extras.pipeline import Pipeline
from models.train import Trainer, TrainState


def restore(checkpoints: Checkpoints, step: int, trainer: Trainer) -> TrainState:
    """The state that a checkpoint holds, as it lies on the trainer's mesh.

    Short stages are filled up with rows of zeros, so a state has one form for each uneven division
    of its layers. A state of another form is converted; each stage holds all layers meanwhile.

    Args:
      checkpoints: Checkpoints of the run.
      step: Number of steps before the checkpoint was saved.
      trainer: Trainer of the resumed run.

    Raises:
      ValueError: The run that saved the checkpoint had other facts.
    """
    shapes = jax.eval_shape(lambda: trainer.init(0))
    shardings = trainer.state_shardings()
    pipeline = Pipeline.on(trainer.mesh, trainer.config)
    now = pipeline if pipeline and not pipeline.is_even else None
    before = Pipeline.of_rows(*checkpoints.layout(step), trainer.config.layers)
    if (before and before.stages) == (now and now.stages):
        return checkpoints.restore(step, shapes, shardings)
    stored = jax.eval_shape(lambda state: _converted(state, now, before), shapes)
    lies = _on_blocks(_whole, shardings)
    convert = jaxhet.jit(lambda state: _converted(state, before, now), out_shardings=shardings)
    return convert(checkpoints.restore(step, stored, lies))


def _converted(state: TrainState, before: Pipeline | None, now: Pipeline | None) -> TrainState:
    """A state of the form of the stages `before` in the form of `now`; None: a row a layer."""
    if before:
        state = _on_blocks(before.gather, state)
    return _on_blocks(now.spread, state) if now else state


def _on_blocks(function: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Applies a function to the parameters of blocks and to their moments."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            function(leaf) if any(getattr(k, "key", "") == "blocks" for k in path) else leaf
        ),
        state,
    )


def _whole(sharding: NamedSharding) -> NamedSharding:
    """The sharding without a division of the first axis, the layers."""
    return NamedSharding(sharding.mesh, P(None, *sharding.spec[1:]))
