"""1F1B: a pipeline that keeps few microbatches, because backward passes begin early.

A stage computes the backward pass of a microbatch as soon as the next stage has sent its gradient
(arXiv:1806.03377), and keeps the *input* of each microbatch until then: of 4 (stages - 1) + 1 at
most, however many a batch has. The backward pass computes the stage again from that input, so the
values inside a stage are kept for one microbatch only, by the config's `remat`.

In step t stage s computes microbatch t - 2s forward, and t - 4 (stages - 1) + 2s backward. As in
`models.extras.pipeline` a hop to a neighbour has a step of its own.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.configs import DTYPES, Config
from models.extras.dtypes import at_least_float32
from models.extras.pipeline import Pipeline


def value_and_grad(
    pipeline: Pipeline, graph: nnx.GraphDef, config: Config, params: Any, tokens: jax.Array
) -> tuple[jax.Array, Any]:
    """Mean cross-entropy of a batch, and its gradients.

    Args:
      pipeline: Pipeline of the mesh of `jax.set_mesh`.
      graph: Graph of the model.
      config: Config of the model.
      params: Parameters, spread over the stages.
      tokens: Tokens [batch, positions + 1].
    """

    def local(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        stage = _Stage(pipeline, graph)
        loss, gradients = stage.run(params, pipeline.divide(tokens), config)
        count = math.prod(jax.lax.axis_size(name) for name in split)

        def mean(x: Any, axes: tuple[str, ...], like: Any) -> Any:
            return jax.tree.map(
                lambda x, own: (jax.lax.psum(x, axes) / count).astype(own.dtype), x, like
            )

        return mean(loss, ("stage", *split), loss), {
            name: mean(x, split if name == "blocks" else ("stage", *split), params[name])
            for name, x in gradients.items()
        }

    split = pipeline.split_axes(tokens)
    return pipeline.on_stages(local, params, tokens, split, with_gradients=True)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """One stage: this device's part of the blocks."""

    pipeline: Pipeline
    graph: nnx.GraphDef

    def run(self, params: Any, parts: jax.Array, config: Config) -> tuple[jax.Array, Any]:
        """Sums over this device's microbatches `parts`, of the loss and of gradients."""
        hops, num = len(self.pipeline.stages) - 1, len(parts)
        room = 4 * hops + 1
        stage = jax.lax.axis_index("stage")
        nothing = jnp.zeros(
            (parts.shape[1], parts.shape[2] - 1, config.embed), DTYPES[config.dtype]
        )

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            moved, kept, sums = carry
            # Barriers for the reason that `Pipeline` gives.
            (result, received), (pulled, gradient) = jax.lax.optimization_barrier(moved)
            under_way = (
                jax.lax.ppermute(result, "stage", [(s, s + 1) for s in range(hops)]),
                jax.lax.ppermute(pulled, "stage", [(s + 1, s) for s in range(hops)]),
            )
            ahead, behind = number - 2 * stage, number - 4 * hops + 2 * stage
            kept = kept.at[ahead % room].set(received)
            # The last stage computes a microbatch once, together with its backward pass.
            result = jax.lax.cond(
                _inside(ahead, num) & (stage < hops),
                lambda: self._forward(params, (), received, parts[jnp.clip(ahead, 0, num - 1)])[1],
                lambda: nothing,
            )
            part = parts[jnp.clip(behind, 0, num - 1)]
            pulled, sums = jax.lax.cond(
                _inside(behind, num),
                lambda sums: self._backward(params, kept[behind % room], part, gradient, sums),
                lambda sums: (nothing, sums),
                sums,
            )
            moved = ((result, under_way[0]), (pulled, under_way[1]))
            return (jax.lax.optimization_barrier(moved), kept, sums), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, at_least_float32(x.dtype)), params)
        loss = jnp.zeros((), at_least_float32(nothing.dtype))
        carry = (((nothing, nothing),) * 2, jnp.stack([nothing] * room), (loss, zeros))
        steps = jnp.arange(num + 4 * hops, dtype=jnp.int32)
        loss, gradients = jax.lax.scan(step, carry, steps)[0][2]
        return jax.tree.map(lambda x: x / num, (loss, gradients))

    def _forward(
        self, params: Any, sums: Any, received: jax.Array, part: jax.Array
    ) -> tuple[Any, jax.Array]:
        """`sums`, and this stage's result, which the next stage receives."""
        tokens = part[:, :-1]
        x = jax.lax.cond(
            jax.lax.axis_index("stage") == 0,
            lambda params: nnx.merge(self.graph, params).inputs(tokens),
            lambda _: received,
            params,
        )
        model = nnx.merge(self.graph, params)
        return self.pipeline.stack(model, sums, x, model.documents(tokens))

    def _backward(
        self, params: Any, received: jax.Array, part: jax.Array, gradient: jax.Array, totals: Any
    ) -> tuple[jax.Array, Any]:
        """The gradient for the previous stage, and the totals with this microbatch's."""
        is_last = jax.lax.axis_index("stage") == len(self.pipeline.stages) - 1
        wide = at_least_float32(received.dtype)

        def run(params: Any, sums: Any, received: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            sums, result = self._forward(params, sums, received, part)
            loss = jax.lax.cond(
                is_last,
                lambda params: nnx.merge(self.graph, params).loss(result, part[:, 1:]).astype(wide),
                lambda _: jnp.zeros((), wide),
                params,
            )
            return sums, result, loss

        total, gradients = totals
        sums, _ = self.pipeline.sums_of(gradients)
        (_, _, loss), pull = jax.vjp(run, params, sums, received)
        own, sums, pulled = pull((sums, jnp.where(is_last, 0, gradient), jnp.ones_like(loss)))
        added = jax.tree.map(lambda total, x: total + x.astype(total.dtype), gradients, own)
        if sums:
            added["blocks"] = sums
        return pulled, (total + loss, added)


def _inside(number: jax.Array, num: int) -> jax.Array:
    return (number >= 0) & (number < num)
