"""`--stages auto`: layers of each pipeline stage, by the islands' measured times.

Each stage's devices train models of one and of three layers on a microbatch, alone. The times give
the cost of a layer, and that of embedding and head. With 1F1B these belong to the first and the
last stage; with GPipe all stages wait while they are computed, before and after the pipeline.
"""

import dataclasses
import functools
import math
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
# Least seconds of a measurement. A shared GPU runs its programs in turns of milliseconds, so a
# short program could run in a single turn.
_LONG = 0.2
# With 1F1B a stage, but the last one, computes its layers forward once more. Backward takes as
# long as forward twice, and remat full computes forward twice already.
_FORWARD_AGAIN = {"full": 5 / 4, "dots": 4 / 3}
# Uneven stages must promise a step that is shorter by this part: measurements have noise.
_LEAST_GAIN = 0.05


@dataclasses.dataclass(frozen=True)
class Stages:
    """The number of layers of each stage, and the reason as a line of text.

    `seconds` is the time of the slowest stage for a microbatch, and `ends` that of the embedding
    and the head for one where all stages wait for it.
    """

    layers: tuple[int, ...]
    seconds: float
    ends: float
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
    fixed, waiting = np.zeros(num), float(max(ends[-1], embedding[0]))
    if config.pipeline == "1f1b":
        layer[:-1] *= _FORWARD_AGAIN[kept(config)]
        fixed[0] += embedding[0]
        fixed[-1] += max(ends[-1] - embedding[-1], 0)
        waiting = 0.0
    layers = jaxhet.balanced_split(config.layers, layer.tolist(), fixed=fixed.tolist())
    every = [Cost(*map(float, pair)) for pair in zip(layer, fixed, strict=True)]
    even = longest(every, [-(-config.layers // num)] * num)
    why = "measured"
    if config.layers % num == 0 and longest(every, layers) > (1 - _LEAST_GAIN) * even:
        layers, why = (config.layers // num,) * num, "measured: no others gain enough"
    each = ", ".join(f"{c.microbatch:.3g} s + {c.fixed:.2g} s" for c in every)
    return Stages(
        layers,
        longest(every, layers),
        waiting,
        f"stages: {','.join(map(str, layers))} layers ({why}); a layer and an end of the model "
        f"take the stages {each} for a microbatch; the slowest stage needs "
        f"{longest(every, layers):.3g} s, with equal stages {even:.3g} s",
    )


def kept(config: Config) -> str:
    """Policy in `REMAT` of uneven stages (`Llama.stack`)."""
    return "full" if config.remat == "full" else "dots"


def _alone(mesh: jax.sharding.Mesh, stage: int) -> jax.sharding.Mesh:
    """Devices of one stage as a mesh without the axis `stage`."""
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
        own = dataclasses.replace(config, layers=layers, stages=(), remat=kept(config))
        trainer = Trainer(own, schedule, mesh)
        shardings = trainer.state_shardings().params
        params = jaxhet.jit(lambda: trainer.init(0).params, out_shardings=shardings)()
        loss = functools.partial(program, own) if program else trainer.loss
        gradients = jaxhet.jit(jax.value_and_grad(loss))
        split = activation_sharding("tokens", mesh)
        batch = jax.make_array_from_callback(tokens.shape, split, lambda index: tokens[index])

        def mean(count: int) -> float:
            begin = time.perf_counter()
            last = None
            for _ in range(count):
                last = gradients(params, batch)
            jaxhet.block_until_ready(last)
            return (time.perf_counter() - begin) / count

        mean(1)  # compiles
        count = max(3, math.ceil(_LONG / mean(1)))
        return statistics.median(mean(count) for _ in range(_REPEATS))

    with jax.set_mesh(mesh):
        cost = fit({layers: seconds(layers) for layers in (1, 3)})
        return cost.microbatch, cost.fixed, seconds(1, _embedding)


def _embedding(config: Config, params: Any, tokens: jax.Array) -> jax.Array:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return jnp.sum(nnx.merge(graph, params).inputs(tokens[:, :-1]))
