"""Loss, state and step of training: pure functions of JAX arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from models.configs import DTYPES, Config
from models.extras import one_f_one_b
from models.extras.accumulate import Accumulation, value_and_grad_of_shares
from models.extras.diloco import DiLoCo
from models.extras.dtypes import at_least_float32, check_dtypes
from models.extras.pipeline import Pipeline
from models.llama import Llama
from models.sharding import (
    SEQUENCE,
    activation_sharding,
    check_positions,
    constrain,
    parameter_shardings,
    path_name,
    replicated,
    split_further,
)

Params = dict[str, Any]

_UINTS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
# The learning rate at the end of a cosine, of that after the warm-up (Llama 2, arXiv:2307.09288).
FINAL_RATE = 0.1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State that a step changes: finished steps (int32), parameters by name, optimizer state.

    The leaves are arrays, or their shapes or shardings.
    """

    step: Any
    params: Params
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """AdamW's settings.

    After `warmup` linear steps the rate is constant; or, if `cosine_steps` is not 0, it falls along
    half a cosine (arXiv:1608.03983) to `FINAL_RATE` of itself at that step, and stays there.

    Moments are kept as `dtype`, a name in `models.configs.DTYPES`, and computed in float32; in
    float64 where parameters or moments are.
    """

    learning_rate: float
    warmup: int
    weight_decay: float
    max_gradient_norm: float
    cosine_steps: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_dtypes(self.dtype)

    def rate(self, step: Any) -> Any:
        """The learning rate of a step, the first being 1.

        The warm-up has no sum of a product, because such a sum rounds differently with and without
        FMA: unlike islands would have rates that are 1e-7 apart. The cosine may still differ.
        """
        warmup = max(self.warmup, 1)

        def rise(step: Any) -> Any:
            return self.learning_rate * (jnp.asarray(jnp.minimum(step, warmup), float) / warmup)

        rate: Any = rise
        if self.cosine_steps:
            fall = optax.cosine_decay_schedule(
                self.learning_rate, max(self.cosine_steps - warmup, 1), FINAL_RATE
            )
            rate = optax.join_schedules([rate, fall], [warmup])
        return rate(step)

    def transformation(self) -> optax.GradientTransformation:
        """Clipping by the global norm, then AdamW (arXiv:1711.05101); only matrices decay."""
        update = optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adamw(
                lambda count: self.rate(count + 1),
                b2=0.95,
                weight_decay=self.weight_decay,
                mask=_is_matrix,
            ),
        )
        return _kept_as(update, DTYPES[self.dtype])


def _kept_as(
    update: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformation:
    """`update` computed in float32 at least, with a state of floats of `dtype`."""

    def init(params: Any) -> Any:
        return _cast(update.init(_widened(params)), dtype)

    def step(updates: Any, state: Any, params: Any = None) -> Any:
        inputs = (_widened(tree) for tree in (updates, state, params))
        updates, state = update.update(*inputs)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, step)


def _widened(tree: Any) -> Any:
    """The floats of a tree as float32; float64 stays."""
    return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)) if _is_float(x) else x, tree)


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    """The floats of a tree as `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_matrix(params: Any) -> Any:
    """Which parameters are matrices: all but the scales of norms and the biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(("/scale", "/bias")), params
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The model to train, how, and on which mesh. Its methods are to be jitted or traced.

    The optimizer's state and update are split like the parameters, and over the mesh axes
    `update_axes` too (ZeRO stage 1, arXiv:2004.13336). Each element of a parameter is then computed
    on one device and gathered from it. So all replicas have equal bits, whatever their arithmetic.

    `accumulation` says how a batch is computed in parts; on a mesh with stages the pipeline does
    that. `parts` is the number of parts of a microbatch of unequal shares, by name of an island
    or platform. With `diloco` positions of `data` train for themselves; `jax.set_mesh` must be set.
    """

    config: Config
    schedule: Schedule
    mesh: jax.sharding.Mesh
    update_axes: tuple[str, ...] = ()
    accumulation: Accumulation = dataclasses.field(default_factory=lambda: Accumulation(parts=1))
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    diloco: DiLoCo | None = None

    def __post_init__(self) -> None:
        if self.accumulation.parts > 1 and "stage" in self.mesh.shape:
            raise ValueError(
                f"--accumulate {self.accumulation.parts} on a mesh with stages, where microbatches "
                "are summed already: give --microbatches instead."
            )
        if SEQUENCE in self.mesh.shape:
            self._check_sequence()
        if self.config.document_end is not None and self.config.attention == "cudnn":
            raise ValueError(
                "--attention cudnn with --document-mask: JAX's public function has no documents "
                "for cuDNN; choose auto or xla."
            )

    def init(self, seed: int) -> TrainState:
        """A new state; a parameter's values depend on `seed`, not on the mesh."""
        params = nnx.to_pure_dict(nnx.state(Llama(self.config, rngs=nnx.Rngs(seed)), nnx.Param))
        if self._pipeline:
            params["blocks"] = self._pipeline.spread(params["blocks"])
        return self.begin(params)

    def begin(self, params: Params) -> TrainState:
        """A new state of parameters."""
        transformation = self.schedule.transformation()
        if self.diloco:
            optimizer = self.diloco.init(transformation, params)
        else:
            optimizer = transformation.init(params)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer)

    def place(self, params: Params) -> Params:
        """Parameters of the whole model as the state has them: on stages, if there are any."""
        if self._pipeline is None:
            return params
        pipeline = self._pipeline
        spread = jax.jit(pipeline.spread, out_shardings=self.state_shardings().params["blocks"])
        return {**params, "blocks": spread(params["blocks"])}

    def step(
        self, state: TrainState, tokens: jax.Array, counts: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; also `loss` and `gradient_norm`. With DiLoCo each position has its own.

        Args:
          state: The state before the step.
          tokens: Tokens [batch, positions + 1]; with `counts`, shares (`models.extras.shares`).
          counts: Microbatches of each share, or None.
        """
        if self.diloco:
            params, optimizer, measures = self.diloco.step(
                self.schedule.transformation(),
                self.value_and_grad,
                state.params,
                state.optimizer,
                tokens,
            )
            return TrainState(state.step + 1, params, optimizer), measures
        loss, gradients = self.value_and_grad(state.params, tokens, counts)
        gradients, params = self._split(gradients), self._split(state.params)
        updates, optimizer = self.schedule.transformation().update(
            gradients, state.optimizer, params
        )
        updated: Any = optax.apply_updates(params, updates)
        measures = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(state.step + 1, self._whole(self._split(updated)), optimizer), measures

    def _check_sequence(self) -> None:
        if "stage" in self.mesh.shape:
            raise ValueError(
                f"a mesh {dict(self.mesh.shape)}: a pipeline does not split positions; leave out "
                f"stage or {SEQUENCE}."
            )
        if self.config.attention == "cudnn":
            raise ValueError(
                f"--attention cudnn on a mesh with {SEQUENCE}, where attention is"
                " models.extras.ring's: choose auto or xla."
            )
        if self.config.document_end is not None:
            raise ValueError(
                f"--document-mask on a mesh with {SEQUENCE}, where attention is"
                " models.extras.ring's and crosses the ends of documents: leave out"
                f" --document-mask or {SEQUENCE}."
            )

    def value_and_grad(
        self, params: Params, tokens: jax.Array, counts: jax.Array | None = None
    ) -> tuple[jax.Array, Params]:
        """`loss` and its gradients.

        Args:
          params: Parameters as the state has them.
          tokens: Tokens [batch, positions + 1]; with `counts`, shares (`models.extras.shares`).
          counts: Microbatches of each share, or None.
        """
        if counts is not None:
            return value_and_grad_of_shares(self.loss, self.parts, params, tokens, counts)
        if self._pipeline and self.config.pipeline == "1f1b":
            graph = self._graph()
            return one_f_one_b.value_and_grad(self._pipeline, graph, self.config, params, tokens)
        if self.accumulation.parts == 1:
            return jax.value_and_grad(self.loss)(params, tokens)
        return self.accumulation.value_and_grad(self.loss, params, tokens)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats, of each token given those before it."""
        if self._pipeline:
            return self._pipeline.loss(self._graph(), params, tokens)
        check_positions(tokens.shape[1] - 1, self.mesh.shape)
        # Sliced while whole: slices of split rows would be exchanges with neighbours.
        whole = (constrain(x, "tokens") for x in (tokens[:, :-1], tokens[:, 1:]))
        inputs, labels = (constrain(x, "positions") for x in whole)
        model = nnx.merge(self._graph(), params)
        return model.loss(model.hidden(inputs), labels)

    def state_shardings(self) -> TrainState:
        """A `TrainState` of shardings: moments lie like the update, the rest everywhere."""
        shapes = jax.eval_shape(lambda: self.init(seed=0))
        params = parameter_shardings(shapes.params, self.mesh)
        if self.diloco:
            transformation = self.schedule.transformation()
            optimizer = self.diloco.shardings(transformation, shapes.optimizer, params)
            return TrainState(replicated(self.mesh), params, optimizer)
        update = split_further(shapes.params, params, self.update_axes)
        everywhere = replicated(self.mesh)
        optimizer = optax.tree_utils.tree_map_params(
            self.schedule.transformation(),
            lambda _, sharding: sharding,
            shapes.optimizer,
            update,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(everywhere, params, optimizer)

    def compile(self, jit: Callable[..., Any]) -> tuple[Any, Any]:
        """`init` and `step` under `jit`, with their shardings; `step` reuses the state's memory."""
        shardings = self.state_shardings()
        init = jit(self.init, static_argnums=0, out_shardings=shardings)
        measures = NamedSharding(self.mesh, P("data")) if self.diloco else replicated(self.mesh)
        step = jit(self.step, donate_argnums=0, out_shardings=(shardings, measures))
        return init, step

    def compile_loss(self, jit: Callable[..., Any]) -> Any:
        """`loss` under `jit`, from parameters and tokens, the same everywhere."""
        return jit(self.loss, out_shardings=replicated(self.mesh))

    def lower(
        self, jit: Callable[..., Any], batch: int, positions: int, microbatches: int = 0
    ) -> Any:
        """`step` under a `jit`, lowered; no array is made.

        Args:
          jit: `jax.jit` or `jaxhet.jit`.
          batch: Number of rows of a batch.
          positions: Number of positions of a row.
          microbatches: Number of microbatches that are shared unequally; 0: the batch is not.
        """
        _, step = self.compile(jit)
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: self.init(0)),
            self.state_shardings(),
        )
        with jax.set_mesh(self.mesh):
            return step.lower(state, *self._inputs(batch, positions, microbatches))

    def _inputs(self, batch: int, positions: int, microbatches: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the arguments of `step` behind the state."""
        split = activation_sharding("shares" if microbatches else "tokens", self.mesh)
        if not microbatches:
            return [jax.ShapeDtypeStruct((batch, positions + 1), jnp.int32, sharding=split)]
        num = self.mesh.shape["data"]
        shape = (num, microbatches - num + 1, batch // microbatches, positions + 1)
        counts = jax.ShapeDtypeStruct((num,), jnp.int32, sharding=replicated(self.mesh))
        return [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split), counts]

    def _split(self, params: Params) -> Params:
        """Parameters or a similar tree, split over `update_axes` as well."""
        if not self.update_axes:
            return params
        shardings = parameter_shardings(params, self.mesh)
        return jax.lax.with_sharding_constraint(
            params, split_further(params, shardings, self.update_axes)
        )

    def _whole(self, params: Params) -> Params:
        """Split parameters, gathered as integers, which no codec rounds."""
        if not self.update_axes:
            return params
        bits = jax.tree.map(
            lambda x: jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]), params
        )
        bits = jax.lax.with_sharding_constraint(
            self._split(bits), parameter_shardings(bits, self.mesh)
        )
        return jax.tree.map(lambda x, own: jax.lax.bitcast_convert_type(x, own.dtype), bits, params)

    @property
    def _pipeline(self) -> Pipeline | None:
        return Pipeline.on(self.mesh, self.config)

    def _graph(self) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0))))
