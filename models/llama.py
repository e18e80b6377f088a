"""A LLaMA language model in Flax NNX: embedding, a stack of equal blocks, norm, output head."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from models.configs import DTYPES, Config
from models.layers import Attention, RMSNorm, SwiGLU, linear
from models.sharding import constrain


class Block(nnx.Module):
    """One layer: attention and feed-forward, each normalized first and added to its input."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        norm = partial(RMSNorm, config.embed, epsilon=config.norm_epsilon)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to [B, T, E]."""
        x = constrain(x + self.attention(self.attention_norm(x)), "residual")
        return constrain(x + self.mlp(self.mlp_norm(x)), "residual")


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

        def apply(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        step = nnx.remat(apply) if self.config.remat else apply
        unroll = 1 if self.config.scan else self.config.layers
        stack = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=unroll)
        x = stack(self.blocks, constrain(self.embed(tokens), "residual"))
        return constrain(self.head(self.final_norm(x)), "logits").astype(jnp.float32)
