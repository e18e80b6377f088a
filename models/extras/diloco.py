"""DiLoCo: the positions of the mesh axis `data` train for themselves, and meet every few steps.

`TrainState.params` are the outer parameters, which evaluations and checkpoints have. Each
position's own parameters are in the optimizer's state, as are exchanges that are under way.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import optim
from models.extras.options import Options

AXIS = "data"
# Axes that can split the model of a position.
_INSIDE = ("fsdp", "model")

Params = dict[str, Any]
ValueAndGrad = Callable[[Params, jax.Array], tuple[jax.Array, Params]]


class DiLoCoOptimizer(NamedTuple):
    """State of the optimizer.

    Attributes:
      own: parameters of each position, with a leading dimension for the positions.
      state: `jaxhet.optim.DiLoCoState` without its `params`.
    """

    own: Params
    state: Any


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Settings, as in `jaxhet.optim.diloco`; the outer optimizer is SGD with Nesterov momentum."""

    every: int
    fragments: int
    delay: int
    wire: str
    outer_lr: float
    outer_momentum: float

    def init(self, inner: optax.GradientTransformation, params: Params) -> DiLoCoOptimizer:
        """A new state: all positions begin with `params`."""
        positions = jax.sharding.get_abstract_mesh().shape[AXIS]
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (positions, *x.shape)), params)
        state: Any = self._transformation(inner).init(own)
        return DiLoCoOptimizer(own, state._replace(params=()))

    def step(
        self,
        inner: optax.GradientTransformation,
        value_and_grad: ValueAndGrad,
        params: Params,
        optimizer: DiLoCoOptimizer,
        tokens: jax.Array,
    ) -> tuple[Params, DiLoCoOptimizer, dict[str, jax.Array]]:
        """Outer parameters, state, and measures [positions] after a step.

        Only the exchanges of outer gradients cross the axis.
        """

        def local(own: Params, tokens: jax.Array) -> Any:
            loss, gradients = value_and_grad(jax.tree.map(lambda x: x[0], own), tokens)
            measures = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
            return jax.tree.map(lambda x: x[None], (gradients, measures))

        gradients, measures = jax.shard_map(
            local, in_specs=P(AXIS), out_specs=P(AXIS), axis_names={AXIS}, check_vma=False
        )(optimizer.own, tokens)
        before = optimizer.state._replace(params=params)
        updates, state = self._transformation(inner).update(gradients, before, optimizer.own)
        own: Any = optax.apply_updates(optimizer.own, updates)
        after: Any = state
        return after.params, DiLoCoOptimizer(own, after._replace(params=())), measures

    def shardings(
        self, inner: optax.GradientTransformation, shapes: DiLoCoOptimizer, params: Params
    ) -> DiLoCoOptimizer:
        """Shardings of the state.

        Args:
          inner: Optimizer of a position.
          shapes: Shapes of the state.
          params: Shardings of the parameters.
        """
        places: list[NamedSharding] = jax.tree.leaves(params)
        mesh = places[0].mesh
        everywhere = NamedSharding(mesh, P())
        of_own = jax.tree.map(lambda x: NamedSharding(mesh, P(AXIS, *x.spec)), params)
        inner_state = optax.tree_utils.tree_map_params(
            inner,
            lambda _, sharding: sharding,
            shapes.state.inner_state,
            of_own,
            transform_non_params=lambda _: NamedSharding(mesh, P(AXIS)),
        )

        def outer(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            numbers = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return places[int(numbers[-1])] if numbers else everywhere

        def handle(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            (number,) = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return NamedSharding(mesh, _of_bits(leaf.shape, places[int(number)].spec, mesh.shape))

        state = shapes.state._replace(
            inner_state=inner_state,
            outer_opt_state=jax.tree_util.tree_map_with_path(outer, shapes.state.outer_opt_state),
            step=everywhere,
            in_flight=jax.tree_util.tree_map_with_path(handle, shapes.state.in_flight),
        )
        return DiLoCoOptimizer(of_own, state)

    def _transformation(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        outer = optax.sgd(self.outer_lr, momentum=self.outer_momentum, nesterov=True)
        return optim.diloco(
            inner,
            outer,
            AXIS,
            every=self.every,
            fragments=self.fragments,
            delay=self.delay,
            wire=self.wire,
        )


def _of_bits(shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> P:
    """Sharding of the bits of a parameter: the parameter's, if their dimensions can be split so."""
    entries = [*spec, *[None] * len(shape)]
    fits = (
        name if name is None or n % sizes[name] == 0 else None
        for n, name in zip(shape[1:], entries, strict=False)
    )
    return P(AXIS, *fits)


def chosen(options: Options, mesh: jax.sharding.Mesh, crossing: Sequence[str]) -> DiLoCo | None:
    """The settings that options ask for, or None.

    Args:
      options: Options of the run.
      mesh: The mesh.
      crossing: Axes of the mesh that cross islands.

    Raises:
      ValueError: The options don't fit together, or the mesh has other axes.
    """
    if not options.diloco:
        return None
    asked = f"--diloco on --mesh {options.mesh}"
    others = sorted(set(mesh.shape) - {AXIS, *_INSIDE})
    if AXIS not in mesh.shape or others:
        what = f"the axis {others[0]}" if AXIS in mesh.shape else f"no axis {AXIS}"
        raise ValueError(
            f"{asked}, which has {what}: each position of {AXIS} trains for itself, and"
            f" {' and '.join(_INSIDE)} can split its model; give a mesh such as data=2,fsdp=-1."
        )
    if other := [name for name in crossing if name != AXIS]:
        raise ValueError(
            f"{asked}, whose axis {other[0]} crosses islands: only {AXIS} may; give {AXIS} the"
            " number of islands."
        )
    if options.update == "sharded":
        raise ValueError(
            "--update sharded with --diloco: the parts of an update would cross islands in each"
            " step; leave out --update."
        )
    if options.balance is not None:
        raise ValueError(
            f"--balance {options.balance} with --diloco: each position of {AXIS} averages its own"
            " batch, and batches are equal; leave out one of them."
        )
    period, fragments = options.diloco_sync_period, options.num_diloco_fragments
    delay = options.num_communication_overlapping_steps
    if fragments > period or delay >= period:
        raise ValueError(
            f"--diloco-sync-period {period} with --num-diloco-fragments {fragments} and"
            f" --num-communication-overlapping-steps {delay}: give at most as many fragments, and"
            " fewer steps of overlap."
        )
    return DiLoCo(
        period,
        fragments,
        delay,
        _codec(options.wire),
        options.diloco_outer_lr,
        options.diloco_outer_momentum,
    )


def _codec(text: str) -> str:
    """Codec of the axis in a text as in `JAXHET_WIRE`."""
    parts = (part.strip().rpartition("=") for part in text.split(","))
    by_axis = {axis: codec for axis, _, codec in parts}
    return by_axis.get(AXIS, by_axis.get("", ""))


def facts(diloco: DiLoCo | None, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Facts that a resumed run must share."""
    if diloco is None:
        return {}
    return {"diloco": {**dataclasses.asdict(diloco), "positions": mesh.shape[AXIS]}}


class Gathered:
    """Means over the positions of what their steps have measured, by one exchange."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        everywhere = NamedSharding(mesh, P())
        self._mean = jaxhet.jit(lambda xs: jnp.stack(xs).mean(1), out_shardings=everywhere)

    def __call__(self, window: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Measures of steps, those [positions] replaced by their means."""
        found, structure = jax.tree.flatten(list(window))
        own = [i for i, x in enumerate(found) if jnp.ndim(x)]
        if own:
            means = jaxhet.block_until_ready(self._mean([found[i] for i in own]))
            values = jax.device_get(means.addressable_data(0))
            for i, value in zip(own, values, strict=True):
                found[i] = value
        return jax.tree.unflatten(structure, found)
