"""A language model in Flax NNX, LLaMA's or Qwen's: embedding, equal blocks, norm, output head."""

import jax
from flax import nnx

from models.configs import DTYPES, REMAT, Config
from models.extras.documents import Documents
from models.extras.moe import Experts
from models.layers import Attention, Past, SwiGLU, linear, norm
from models.loss import Head, cross_entropy, project
from models.sharding import constrain, gather_after

# Values passed from block to block: input and output of the previous one.
Carry = tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """One layer: attention and feed-forward, each normalized first and added to its input."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm(config, config.embed)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, config.embed)
        self.mlp = SwiGLU(config, rngs=rngs) if config.shared_mlp else None
        self.moe = Experts(config, rngs=rngs) if config.experts else None

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[B, T, E] to [B, T, E]."""
        return self._feed_forward(x + self.attention(self.attention_norm(x), documents))

    def decode(self, x: jax.Array, past: Past, positions: jax.Array) -> tuple[jax.Array, Past]:
        """`__call__` for new positions, with the keys and values of earlier ones.

        Args:
          x: Activations [B, T, E] of the new positions.
          past: Keys and values of all positions.
          positions: Positions [B, T] of x.

        Returns:
          Activations [B, T, E], and the new past.
        """
        y, past = self.attention.decode(self.attention_norm(x), past, positions)
        return self._feed_forward(x + y), past

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        x = constrain(x, "residual")
        y = self.mlp_norm(x)
        shared = self.mlp(y) if self.mlp else 0
        routed = self.moe(y) if self.moe else 0
        return constrain(x + shared + routed, "residual")


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
            param_dtype=DTYPES[config.param_dtype],
            embedding_init=nnx.initializers.normal(0.02 if config.tied else 1.0),
            rngs=rngs,
        )
        self.blocks = nnx.vmap(lambda rng: Block(config, rngs=rng))(rngs.split(config.layers))
        self.final_norm = norm(config, config.embed)
        self.head = None if config.tied else linear(config, config.embed, config.vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T], integers below `vocab`, to float32 logits [B, T, vocab]."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] to the result of the last block, [B, T, E]."""
        return self.stack(self.inputs(tokens), self.documents(tokens))

    def documents(self, tokens: jax.Array) -> Documents | None:
        """The documents in tokens [B, T], None if the config has no end of documents."""
        end = self.config.document_end
        return None if end is None else Documents.of(tokens, end)

    def inputs(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] to what the first block takes, [B, T, E]."""
        return constrain(self.embed(tokens), "residual")

    def stack(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """All blocks, [B, T, E] to [B, T, E].

        Args:
          x: Activations [B, T, E].
          documents: Documents that attention does not cross, or None.
        """
        remat = self.config.remat

        def apply(block: Block, carry: Carry) -> Carry:
            before, x = carry
            graph, params = nnx.split(block)
            return x, nnx.merge(graph, gather_after(params, before))(x, documents)

        step = apply if remat == "none" else nnx.remat(apply, policy=REMAT[remat])
        unroll = 1 if self.config.scan else self.config.layers
        run = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=unroll)
        return run(self.blocks, (x, x))[1]

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, T, E] of the last block to float32 logits [B, T, vocab]."""
        return project(self.final_norm(x), self._kernel(), self._head().dtype)

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross-entropy, in nats, of labels [B, T] given [B, T, E] of the last block."""
        return cross_entropy(self._head(), self.final_norm(x), self._kernel(), labels)

    def decode(self, tokens: jax.Array, past: Past, positions: jax.Array) -> tuple[jax.Array, Past]:
        """The input of `logits`, [B, T, E], of new positions; and the new past.

        A text is one document, whatever its tokens.

        Args:
          tokens: Tokens [B, T] of the new positions.
          past: Keys and values of all positions; the first axis is the layer.
          positions: Positions [B, T] of the tokens.
        """

        def step(block: Block, past: Past, x: jax.Array) -> tuple[jax.Array, Past]:
            return block.decode(x, past, positions)

        run = nnx.scan(step, in_axes=(0, 0, nnx.Carry), out_axes=(nnx.Carry, 0))
        return run(self.blocks, past, self.inputs(tokens))

    def _head(self) -> Head:
        config = self.config
        return Head(DTYPES[config.logits_dtype or config.dtype], config.loss_chunk)

    def _kernel(self) -> jax.Array:
        """The head's matrix, [E, vocab], in the type that the model computes in."""
        kernel = self.head.kernel[...] if self.head else self.embed.embedding[...].T
        return kernel.astype(DTYPES[self.config.dtype])
