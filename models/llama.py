"""A LLaMA language model in Flax NNX: embedding, a stack of equal blocks, norm, output head."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.configs import DTYPES, Config
from models.layers import Attention, RMSNorm, SwiGLU, linear
from models.moe import Experts
from models.sharding import constrain, gather_after

# What goes from block to block: input and output of the one before.
Carry = tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """One layer: attention and feed-forward, each normalized first and added to its input."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        norm = partial(RMSNorm, config.embed, epsilon=config.norm_epsilon)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = SwiGLU(config, rngs=rngs)
        self.moe = Experts(config, rngs=rngs) if config.experts else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to [B, T, E]."""
        x = constrain(x + self.attention(self.attention_norm(x)), "residual")
        y = self.mlp_norm(x)
        routed = self.moe(y) if self.moe else 0
        return constrain(x + self.mlp(y) + routed, "residual")


class Llama(nnx.Module):
    """A decoder of `config.layers` blocks.

    The parameters of all blocks are stacked: their first axis is the layer, whether or not the
    program loops over it, so a checkpoint does not depend on `config.scan`.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.vocab,
            config.embed,
            dtype=DTYPES[config.dtype],
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )
        self.blocks = nnx.vmap(lambda rng: Block(config, rngs=rng))(rngs.split(config.layers))
        self.final_norm = RMSNorm(config.embed, epsilon=config.norm_epsilon)
        self.head = linear(config, config.embed, config.vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T], integers below `vocab`, to float32 logits [B, T, vocab]."""
        return self.logits(self.stack(self.inputs(tokens)))

    def inputs(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] to what the first block takes, [B, T, E]."""
        return constrain(self.embed(tokens), "residual")

    def stack(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """All blocks, [B, T, E] to [B, T, E]; `used` (bool [layers]) says which, if not all.

        What is not used is not computed: collectives in a block must join devices that agree on it.
        """

        def apply(block: Block, used: jax.Array | None, carry: Carry) -> Carry:
            before, x = carry
            graph, params = nnx.split(block)

            def run(x: jax.Array) -> jax.Array:
                return nnx.merge(graph, gather_after(params, before))(x)

            return x, run(x) if used is None else jax.lax.cond(used, run, lambda x: x, x)

        step = nnx.remat(apply) if self.config.remat else apply
        unroll = 1 if self.config.scan else self.config.layers
        run = nnx.scan(step, in_axes=(0, 0, nnx.Carry), out_axes=nnx.Carry, unroll=unroll)
        return run(self.blocks, used, (x, x))[1]

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, T, E] of the last block to float32 logits [B, T, vocab]."""
        return constrain(self.head(self.final_norm(x)), "logits").astype(jnp.float32)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean, in nats, over logits [B, T, vocab] of each token of [B, T + 1] after the first."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))
