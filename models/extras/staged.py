"""`--stages auto`: layers of each pipeline stage, from what the islands take for them.

Each stage's devices train models of one and of three layers on a microbatch, alone. The times give
the cost of a layer, and that of embedding and head, which the first and the last stage have.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.experimental.multihost_utils import process_allgather

import jaxhet
from models.configs import Config
from models.extras.shares import Cost, fit, longest
from models.llama import Llama
from models.sharding import activation_sharding
from models.train import Schedule, Trainer

_REPEATS = 3
# With 1F1B a stage computes its layers forward three times and backward once, which takes as long
# as forward twice; with GPipe, and in the last stage, forward twice.
_FORWARD_AGAIN = 5 / 4


@dataclasses.dataclass(frozen=True)
class Stages:
    """The number of layers of each stage, and the reason as a line of text.

    `seconds` is the time of the slowest stage for a microbatch.
    """

    layers: tuple[int, ...]
    seconds: float
    why: str


def choose(config: Config, schedule: Schedule, mesh: jax.sharding.Mesh, tokens: Any) -> Stages:
    """Measures all stages at the same time, and chooses. All processes call it.

    Args:
      config: Config of the model, whatever its stages.
      schedule: Schedule of the run.
      mesh: Mesh with an axis `stage`.
      tokens: Tokens [rows, positions + 1] of a microbatch.

    Raises:
      jaxhet.UsageError: There are more stages than layers.
    """
    axis = mesh.axis_names.index("stage")
    num = mesh.shape["stage"]
    local = {d.id for d in jax.local_devices()}
    own = [s for s in range(num) if local & {d.id for d in np.take(mesh.devices, [s], axis).flat}]
    found = np.zeros((num, 3), np.float32)
    found[own] = costs(config, schedule, _alone(mesh, own[0]), tokens)
    return decide(config, np.max(process_allgather(found), axis=0))


def decide(config: Config, costs: npt.NDArray[np.float32]) -> Stages:
    """The stages whose slowest one is the fastest.

    Args:
      config: Config of the model.
      costs: Seconds that each stage takes for a layer, for everything else, and for the embedding,
        [stages, 3].
    """
    num = len(costs)
    layer, ends, embedding = costs.astype(float).T
    if config.pipeline == "1f1b":
        layer[:-1] *= _FORWARD_AGAIN
    fixed = np.zeros(num)
    fixed[0] += embedding[0]
    fixed[-1] += max(ends[-1] - embedding[-1], 0)
    layers = jaxhet.balanced_split(config.layers, layer.tolist(), fixed=fixed.tolist())
    every = [Cost(*map(float, pair)) for pair in zip(layer, fixed, strict=True)]
    each = ", ".join(f"{c.microbatch:.3g} s + {c.fixed:.2g} s" for c in every)
    return Stages(
        layers,
        longest(every, layers),
        f"stages: {','.join(map(str, layers))} layers (measured); a layer and an end of the model "
        f"take the stages {each} for a microbatch; the slowest stage needs "
        f"{longest(every, layers):.3g} s, with equal stages "
        f"{longest(every, [-(-config.layers // num)] * num):.3g} s",
    )


def _alone(mesh: jax.sharding.Mesh, stage: int) -> jax.sharding.Mesh:
    """The mesh of one stage, without the axis `stage`."""
    axis = mesh.axis_names.index("stage")
    devices = np.take(mesh.devices, [stage], axis)
    names = [name for name in mesh.axis_names if name != "stage"] or ["data"]
    return jax.sharding.Mesh(np.atleast_1d(devices.squeeze(axis)), names)


def costs(
    config: Config, schedule: Schedule, mesh: jax.sharding.Mesh, tokens: Any
) -> tuple[float, float, float]:
    """Seconds for a layer, for everything else, and for the embedding.

    Args:
      config: Config of the model, whatever its stages.
      schedule: Schedule of the run.
      mesh: Mesh of the devices that compute, without an axis `stage`.
      tokens: Tokens [rows, positions + 1] of a microbatch.
    """

    def seconds(layers: int, program: Callable[..., Any] | None = None) -> float:
        # Uneven stages keep inputs of layers only (`models.extras.first_rows`).
        own = dataclasses.replace(config, layers=layers, stages=(), remat="full")
        trainer = Trainer(own, schedule, mesh)
        shardings = trainer.state_shardings().params
        params = jaxhet.jit(lambda: trainer.init(0).params, out_shardings=shardings)()
        loss = functools.partial(program, own) if program else trainer.loss
        gradients = jaxhet.jit(jax.value_and_grad(loss))
        split = activation_sharding("tokens", mesh)
        batch = jax.make_array_from_callback(tokens.shape, split, lambda index: tokens[index])
        times = []
        for _ in range(_REPEATS + 1):  # the first one compiles
            begin = time.perf_counter()
            jaxhet.block_until_ready(gradients(params, batch))
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    with jax.set_mesh(mesh):
        cost = fit({layers: seconds(layers) for layers in (1, 3)})
        return cost.microbatch, cost.fixed, seconds(1, _embedding)


def _embedding(config: Config, params: Any, tokens: jax.Array) -> jax.Array:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return jnp.sum(nnx.merge(graph, params).inputs(tokens[:, :-1]))
