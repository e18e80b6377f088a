"""A LLaMA in plain JAX and optax: what a user's own training script looks like.

It knows nothing of jaxhet, nor of `models/`. Parameters are float32, a layer is recomputed in the
backward pass, attention is `jax.nn.dot_product_attention`. The mesh axis is `data` (parameters
replicated) or `fsdp` (split along their last dimension). Activations are constrained to be split
along the batch: else XLA's partitioner may gather them, and not weights.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of the model; the default has 0.89e9 parameters.

    Attributes:
      dtype: The type to compute in, which gradients have when they cross islands.
      attention: cuDNN's, or None for XLA's.
      rows: The sharding of activations [B, T, E]; None leaves it to XLA.
    """

    layers: int = 16
    embed: int = 2048
    heads: int = 16
    hidden: int = 5632
    vocab: int = 32000
    scan: bool = True
    dtype: str = "bfloat16"
    attention: Literal["cudnn"] | None = None
    rows: NamedSharding | None = None


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95))


def init(size: Size, key: jax.Array) -> tuple[Any, Any]:
    """Parameters and optimizer state."""
    n, e, f = size.layers, size.embed, size.hidden
    shapes = {"q": (e, e), "k": (e, e), "v": (e, e), "o": (e, e)}
    shapes |= {"gate": (e, f), "up": (e, f), "down": (f, e)}
    keys = jax.random.split(key, len(shapes) + 2)
    params: Any = {
        name: jax.random.normal(k, (n, *shape)) * 0.02
        for (name, shape), k in zip(shapes.items(), keys[2:], strict=True)
    }
    params |= {"norm1": jnp.ones((n, e)), "norm2": jnp.ones((n, e)), "norm": jnp.ones(e)}
    params["embed"] = jax.random.normal(keys[0], (size.vocab, e)) * 0.02
    params["head"] = jax.random.normal(keys[1], (e, size.vocab)) * 0.02
    return params, OPTIMIZER.init(params)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5) * scale
    return y.astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def block(size: Size, x: jax.Array, layer: Any) -> jax.Array:
    """One layer: [B, T, E] to [B, T, E]."""
    w = jax.tree.map(lambda p: p.astype(x.dtype), layer)
    y = norm(x, layer["norm1"])
    q, k, v = (jnp.reshape(y @ w[n], (*y.shape[:2], size.heads, -1)) for n in "qkv")
    y = jax.nn.dot_product_attention(
        rotate(q), rotate(k), v, is_causal=True, implementation=size.attention
    )
    x = x + y.reshape(x.shape) @ w["o"]
    y = norm(x, layer["norm2"])
    return split(size, x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])


def split(size: Size, x: jax.Array) -> jax.Array:
    """Activations, split along the batch."""
    return x if size.rows is None else jax.lax.with_sharding_constraint(x, size.rows)


def loss(size: Size, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token of [B, T + 1] after the first."""
    x = split(size, params["embed"].astype(size.dtype)[tokens[:, :-1]])
    layers = {k: v for k, v in params.items() if k not in ("embed", "head", "norm")}
    step = jax.checkpoint(lambda x, layer: (block(size, x, layer), None))
    x, _ = jax.lax.scan(step, x, layers, unroll=1 if size.scan else size.layers)
    logits = norm(x, params["norm"]) @ params["head"].astype(x.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return jnp.mean(losses)


def train_step(size: Size, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """Returns the updated (parameters, optimizer state) and the loss."""
    params, moments = state
    value, gradients = jax.value_and_grad(lambda p: loss(size, p, tokens))(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def shardings(size: Size, mesh: jax.sharding.Mesh) -> Any:
    """Shardings of the state: along the last dimension over `fsdp`, if the mesh has it."""

    def one(x: Any) -> NamedSharding:
        if "fsdp" in mesh.shape and x.ndim > 1:
            return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp"))
        return NamedSharding(mesh, P())

    return jax.tree.map(one, jax.eval_shape(lambda: init(size, jax.random.key(0))))


def num_parameters(size: Size) -> int:
    """Number of elements of all arrays."""
    params, _ = jax.eval_shape(lambda: init(size, jax.random.key(0)))
    return sum(x.size for x in jax.tree.leaves(params))
