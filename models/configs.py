"""Sizes of the models, as data: one table, `CONFIGS`."""

import dataclasses

import jax.numpy as jnp

# Compute types by the name that the command line uses; parameters are always float32.
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a LLaMA.

    `query_heads` is a multiple of `kv_heads`: that many query heads share a key and a value head.
    `dtype` (a name in `DTYPES`) is what activations and matrix products are computed in.
    `scan` keeps one copy of the block in the program; without it the layers are unrolled.
    `remat` recomputes a block's activations in the backward pass instead of keeping them.

    With `experts`, each block has so many feed-forward layers beside its own, which every token
    passes, and sends a token to `experts_per_token` of them. An expert has room for
    `capacity_factor` times its even share of a device's tokens; those beyond pass it by.

    On a mesh with stages, `stages` is the number of layers of each (empty: all equal), and a batch
    goes through them in `microbatches` parts.
    """

    layers: int
    embed: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int = 256
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    dtype: str = "float32"
    scan: bool = True
    remat: bool = False
    experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    stages: tuple[int, ...] = ()
    microbatches: int = 4

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads can't share {self.kv_heads} key and value heads "
                "evenly: make query_heads a multiple of kv_heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs of values.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"a token can't go to {self.experts_per_token} of {self.experts} experts: make "
                "experts_per_token at least 1 and at most experts."
            )
        if self.stages and (sum(self.stages) != self.layers or min(self.stages) < 1):
            raise ValueError(
                f"stages {self.stages} don't divide {self.layers} layers: give each stage at least "
                f"one, and all together {self.layers}."
            )


# `1b` and `8b` have the shapes of Llama 3.2 1B and Llama 3.1 8B, over bytes instead of word pieces.
CONFIGS: dict[str, Config] = {
    "tiny": Config(layers=2, embed=32, query_heads=4, kv_heads=2, head_dim=8, hidden=96),
    "demo": Config(layers=4, embed=128, query_heads=4, kv_heads=2, head_dim=32, hidden=352),
    "moe": Config(
        layers=4, embed=128, query_heads=4, kv_heads=2, head_dim=32, hidden=352, experts=8
    ),
    "1b": Config(
        layers=16,
        embed=2048,
        query_heads=32,
        kv_heads=8,
        head_dim=64,
        hidden=8192,
        dtype="bfloat16",
        remat=True,
    ),
    "8b": Config(
        layers=32,
        embed=4096,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=14336,
        dtype="bfloat16",
        remat=True,
    ),
}
