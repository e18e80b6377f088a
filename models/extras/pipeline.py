"""A pipeline over the mesh axis `stage`: each stage has some of the layers, and microbatches flow.

GPipe's schedule (arXiv:1811.06965) as one scan, in which a hop from stage to stage has a step of
its own: in step t stage s computes microbatch t - 2s while its result for the one before is under
way, forward and backward. A schedule that waits for each hop has stages - 1 fewer steps.

Stages may differ in size. Their parameters are rows of one array, so the short ones are filled up
with rows of zeros. A stage computes its own rows only (`models.extras.first_rows`). Collectives
of a layer join devices of one stage, which agree on the number of rows.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxhet
from models.configs import REMAT, Config
from models.extras.documents import Documents
from models.extras.dtypes import at_least_float32
from models.extras.first_rows import FirstRows, run_first
from models.llama import Llama
from models.sharding import batch_axes, constrain

AUTO = "auto"


def parse_stages(text: str | None) -> tuple[int, ...]:
    """`3,1` as a tuple of the layers of each stage; empty for None.

    Raises:
      ValueError: The text has another form.
    """
    parts = text.split(",") if text else []
    if text == AUTO:
        raise ValueError(f"--stages {AUTO} is measured when a run begins: give numbers here.")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--stages {text!r} is not of the form 3,1.")
    return tuple(int(part) for part in parts)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Number of layers of each stage, and number of microbatches of a batch.

    `by_island` maps names of islands to the layers of their stages, if all stages of an island have
    the same number: it is a constant then, and XLA compiles no branch.
    """

    stages: tuple[int, ...]
    microbatches: int
    by_island: tuple[tuple[str, int], ...] = ()

    @classmethod
    def on(cls, mesh: jax.sharding.Mesh, config: Config) -> Self | None:
        """The pipeline of a mesh with an axis `stage`, None on one without.

        Raises:
          ValueError: The config's stages are not those of the mesh.
        """
        count = mesh.shape.get("stage", 0)
        if not count:
            return None
        if config.layers < count:
            raise ValueError(
                f"{config.layers} layers are too few for stage={count}: each stage needs one; "
                f"choose a mesh with stage={config.layers} at most."
            )
        if not config.stages and config.layers % count:
            raise ValueError(
                f"{config.layers} layers can't be divided over stage={count} evenly: say how many "
                "each stage has (stages)."
            )
        stages = config.stages or (config.layers // count,) * count
        if len(stages) != count:
            raise ValueError(f"stages {stages} are {len(stages)}, but the mesh has stage={count}.")
        return cls(stages, config.microbatches, _by_island(mesh, stages))

    @classmethod
    def of_rows(cls, stages: tuple[int, ...], rows: int, layers: int) -> Self | None:
        """The pipeline that a saved state was made for, if its stages are uneven.

        Args:
          stages: Layers of each stage, as the run had them; empty: the run named none.
          rows: Rows of the saved parameters of blocks.
          layers: Layers of the model.
        """
        return cls(stages, 1) if sum(stages) == layers < rows else None

    def spread(self, blocks: Any) -> Any:
        """The parameters of all layers, first axis [layers], with as many rows for each stage."""
        starts = np.cumsum((0, *self.stages))
        rows = [min(starts[s] + row, starts[-1] - 1) for s, row in np.ndindex(self._used().shape)]

        def spread(x: jax.Array) -> jax.Array:
            used = self._used().reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(used, x[np.array(rows)], 0)

        return jax.tree.map(spread, blocks)

    def gather(self, blocks: Any) -> Any:
        """The parameters of all layers, first axis [layers], from what `spread` made of them."""
        return jax.tree.map(lambda x: x[np.flatnonzero(self._used())], blocks)

    def loss(self, graph: nnx.GraphDef, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean cross-entropy of a batch.

        Args:
          graph: Graph of the model.
          params: Parameters, spread over the stages.
          tokens: Tokens [batch, positions + 1].

        Raises:
          ValueError: The batch can't be divided into microbatches.
        """
        split = self.split_axes(tokens)

        def local(params: Any, tokens: jax.Array) -> jax.Array:
            # Here, and not where they are used, so that gradients are summed once, after the scan.
            params = {
                name: _varying(x, split if name == "blocks" else ("stage", *split))
                for name, x in params.items()
            }
            sums, params = self.sums_of(params)
            model = partial(nnx.merge, graph, params)
            x = self._flow(model, sums, tokens)
            last = jax.lax.axis_index("stage") == len(self.stages) - 1
            loss = self._loss_of(last, lambda x: model().loss(x, tokens[:, 1:]), x, split)
            return jax.lax.pmean(jax.lax.psum(loss, "stage"), split)

        return self.on_stages(local, params, tokens, split)

    def split_axes(self, tokens: jax.Array) -> tuple[str, ...]:
        """The mesh axes that split a batch and its microbatches.

        Raises:
          ValueError: The batch can't be divided into microbatches.
        """
        mesh = jax.sharding.get_abstract_mesh()
        split = tuple(name for name in batch_axes(mesh.axis_names) if name != "expert")
        parts = math.prod(mesh.shape[name] for name in split) * self.microbatches
        if len(tokens) % parts:
            raise ValueError(
                f"a batch of {len(tokens)} can't be divided into {self.microbatches} microbatches "
                f"on a mesh {dict(mesh.shape)}: choose a multiple of {parts}."
            )
        return split

    def on_stages(
        self,
        local: Callable[..., Any],
        params: Any,
        tokens: jax.Array,
        split: tuple[str, ...],
        with_gradients: bool = False,
    ) -> Any:
        """Runs a function on all stages.

        Args:
          local: Function of a stage's parameters and its tokens.
          params: Parameters, spread over the stages.
          tokens: Tokens [batch, positions + 1].
          split: Mesh axes that split the batch.
          with_gradients: Whether `local` also returns gradients, summed already.
        """
        lies = {name: P("stage") if name == "blocks" else P() for name in params}
        return jax.shard_map(
            local,
            in_specs=(lies, P(split)),
            out_specs=(P(), lies) if with_gradients else P(),
            axis_names={"stage", *split},
            check_vma=not with_gradients,  # which are summed by `local`
        )(params, tokens)

    def _loss_of(
        self,
        last: jax.Array,
        loss: Callable[[jax.Array], jax.Array],
        x: jax.Array,
        split: tuple[str, ...],
    ) -> jax.Array:
        """The loss on the last stage, and 0 on the others.

        Even stages all compute it: their exchanges overlap with its products.
        """
        if self.is_even:
            return jnp.where(last, loss(x), 0)
        zero = _varying(jnp.zeros((), at_least_float32(x.dtype)), ("stage", *split))
        return jax.lax.cond(last, lambda x: loss(x).astype(zero.dtype), lambda _: zero, x)

    def sums_of(self, params: Any) -> tuple[Any, Any]:
        """Arrays that `stack` adds gradients to, none for even stages; and parameters."""
        if self.is_even:
            return (), params
        blocks = params["blocks"]
        return blocks, {**params, "blocks": jax.lax.stop_gradient(blocks)}

    def stack(
        self, model: Llama, sums: Any, x: jax.Array, documents: Documents | None
    ) -> tuple[Any, jax.Array]:
        """`sums`, and the result of this stage's layers.

        Stages of uneven size keep less than `config.remat` none does.

        Args:
          model: The model; its blocks are this stage's.
          sums: Result of `sums_of`, or sums so far with the same shapes.
          x: Activations [B, T, E].
          documents: Documents that attention does not cross, or None.
        """
        if self.is_even:
            return sums, model.stack(x, documents)
        config = model.config
        graph, params = nnx.split(model.blocks)

        def layer(own: Any, x: jax.Array, documents: Documents | None) -> jax.Array:
            return nnx.merge(graph, own)(x, documents)

        # Others would keep parameters.
        policy = REMAT["full" if config.remat == "full" else "dots"]
        layer = jax.checkpoint(layer, policy=policy)
        rows = dataclasses.replace(self.rows, unroll=not config.scan)
        return run_first(layer, rows, nnx.to_pure_dict(params), sums, x, documents)

    @property
    def rows(self) -> FirstRows:
        """The layers of the stage that runs."""
        return FirstRows((*sorted({*self.stages}),), self._place)

    def _place(self) -> jax.Array:
        """The place of this stage's number of layers among all numbers."""
        counts = sorted({*self.stages})
        if self.by_island:
            own = {name: _constant(counts.index(count)) for name, count in self.by_island}
            return jaxhet.per_platform(**own)()
        places = jnp.array([counts.index(count) for count in self.stages], jnp.int32)
        return places[jax.lax.axis_index("stage")]

    @property
    def is_even(self) -> bool:
        """Whether all stages have equally many layers."""
        return len(set(self.stages)) == 1

    def _used(self) -> np.ndarray:
        """Which rows hold a layer, bool [stages, rows of a stage]."""
        return np.arange(max(self.stages)) < np.array(self.stages)[:, None]

    def _flow(self, model: Callable[[], Llama], sums: Any, tokens: jax.Array) -> jax.Array:
        """The output of this stage for all tokens: [batch, positions, embed].

        Args:
          model: Makes the model. Each use calls it: a loop can't use a model from outside.
          sums: Result of `sums_of`.
          tokens: Tokens [batch, positions + 1].
        """
        hops = len(self.stages) - 1
        inputs = constrain(self.divide(model().inputs(tokens[:, :-1])), "microbatches")
        inputs = jnp.pad(inputs, ((0, 2 * hops), *[(0, 0)] * 3))
        documents = jax.tree.map(self.divide, model().documents(tokens[:, :-1]))
        stage = jax.lax.axis_index("stage")

        def step(carry: Any, now: tuple[jax.Array, jax.Array]) -> Any:
            (x, number), (moved, sums) = now, carry
            # XLA moves a permute whose result is handed on to the next step into that step, where
            # nothing is left to compute beside it; likewise in the backward pass. Barriers hold it.
            received, before = jax.lax.optimization_barrier(moved)
            under_way = jax.lax.ppermute(before, "stage", [(s, s + 1) for s in range(hops)])
            own = jnp.clip(number - 2 * stage, 0, self.microbatches - 1)
            inside = jax.tree.map(lambda x: x[own], documents)
            x = jnp.where(stage == 0, x, received)
            sums, result = self.stack(model(), sums, x, inside)
            return (jax.lax.optimization_barrier((under_way, result)), sums), before

        nothing = jnp.zeros_like(inputs[0])
        numbers = jnp.arange(len(inputs), dtype=jnp.int32)
        carry = ((nothing, nothing), sums)
        ((_, last), _), before = jax.lax.scan(step, carry, (inputs, numbers))
        results = jnp.concatenate([before[2 * hops + 1 :], last[None]])
        results = constrain(results, "microbatches")  # only the last stage uses them
        return results.swapaxes(0, 1).reshape(len(tokens), *results.shape[2:])

    def divide(self, x: jax.Array) -> jax.Array:
        """[B, …] to [microbatches, B / microbatches, …]; neighbours in a batch part.

        So each microbatch lies on all devices that the batch is split over.
        """
        return x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)


def _constant(number: int) -> Callable[[], jax.Array]:
    return lambda: jnp.int32(number)


def _by_island(mesh: jax.sharding.Mesh, stages: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """The number of layers by island; empty where stages of an island differ, or outside a job."""
    try:
        islands = jaxhet.islands()
    except jaxhet.UsageError:
        return ()
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0)
    found = {
        (island.name, count)
        for island in islands
        for count, devices in zip(stages, by_stage, strict=True)
        if {d.id for d in island.devices} & {d.id for d in np.ravel(devices)}
    }
    return tuple(sorted(found)) if len(found) == len(islands) else ()


def _varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same values, with a type that lets them differ along `axes`."""
    return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree)
