"""Loss, state and step of training: pure functions of JAX arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.configs import Config
from models.llama import Llama, cross_entropy
from models.pipeline import Pipeline
from models.sharding import activation_sharding, parameter_shardings, path_name, replicated

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: finished steps (int32), parameters by name, optimizer state.

    The leaves are arrays, or what stands for them: shapes, shardings.
    """

    step: Any
    params: Params
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """AdamW's settings. The rate is constant after the warm-up: `--steps` does not change it."""

    learning_rate: float
    warmup: int
    weight_decay: float
    max_gradient_norm: float

    def transformation(self) -> optax.GradientTransformation:
        """Clipping by the global norm, then AdamW (arXiv:1711.05101); only matrices decay."""
        rate = optax.linear_schedule(0.0, self.learning_rate, max(self.warmup, 1))
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adamw(
                lambda count: rate(count + 1),
                b2=0.95,
                weight_decay=self.weight_decay,
                mask=_is_matrix,
            ),
        )


def _is_matrix(params: Any) -> Any:
    """Which parameters are matrices: all but the scales of norms."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith("/scale"), params
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What is to be trained, how, and on which mesh. Its methods are to be jitted or traced."""

    config: Config
    schedule: Schedule
    mesh: jax.sharding.Mesh

    def init(self, seed: int) -> TrainState:
        """A new state; a parameter's values depend on `seed`, not on the mesh."""
        params = nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(seed)), nnx.Param))
        if self._pipeline:
            params["blocks"] = self._pipeline.spread(params["blocks"])
        return TrainState(
            jnp.zeros((), jnp.int32), params, self.schedule.transformation().init(params)
        )

    def step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update from tokens [batch, positions + 1]; also `loss` and `gradient_norm`."""
        loss, gradients = jax.value_and_grad(self.loss)(state.params, tokens)
        updates, optimizer = self.schedule.transformation().update(
            gradients, state.optimizer, state.params
        )
        params: Any = optax.apply_updates(state.params, updates)
        measures = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(state.step + 1, params, optimizer), measures

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats per byte, of each token given those before it."""
        if self._pipeline:
            return self._pipeline.loss(self._graph(), params, tokens)
        logits = nnx.merge(self._graph(), params)(tokens[:, :-1])
        return cross_entropy(logits, tokens)

    def state_shardings(self) -> TrainState:
        """A `TrainState` of shardings: moments lie like their parameters, the rest everywhere."""
        shapes = jax.eval_shape(lambda: self.init(seed=0))
        params = parameter_shardings(shapes.params, self.mesh)
        everywhere = replicated(self.mesh)
        optimizer = optax.tree_utils.tree_map_params(
            self.schedule.transformation(),
            lambda _, sharding: sharding,
            shapes.optimizer,
            params,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(everywhere, params, optimizer)

    def compile(self, jit: Callable[..., Any]) -> tuple[Any, Any]:
        """`init` and `step` under `jit`, with their shardings; `step` reuses the state's memory."""
        shardings = self.state_shardings()
        init = jit(self.init, static_argnums=0, out_shardings=shardings)
        step = jit(self.step, donate_argnums=0, out_shardings=(shardings, replicated(self.mesh)))
        return init, step

    def lower(self, jit: Callable[..., Any], batch: int, positions: int) -> Any:
        """`step` under `jit`, lowered for batches of that size; no array is made."""
        _, step = self.compile(jit)
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: self.init(0)),
            self.state_shardings(),
        )
        split = activation_sharding("tokens", self.mesh)
        tokens = jax.ShapeDtypeStruct((batch, positions + 1), jnp.int32, sharding=split)
        with jax.set_mesh(self.mesh):
            return step.lower(state, tokens)

    @property
    def _pipeline(self) -> Pipeline | None:
        return Pipeline.on(self.mesh, self.config)

    def _graph(self) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0))))
