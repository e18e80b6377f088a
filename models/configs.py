"""Sizes of the models, as data: one table, `CONFIGS`."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax

from models.attention import ATTENTIONS
from models.extras.dtypes import DTYPES as DTYPES
from models.extras.dtypes import check_dtypes


def _is_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether an equation is cuDNN's attention, forward."""
    return primitive.name.startswith("dot_product_attention_fwd")


# Values that a block keeps for the backward pass. none: all of them; full: its input; dots: its
# input, products by parameters, and results of cuDNN's attention.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _is_cudnn_attention
    ),
}

# Order of a pipeline's microbatches. gpipe: all forward, then all backward. 1f1b: each backward as
# early as possible; a stage keeps inputs of few microbatches, and computes the rest again.
PIPELINES = ("gpipe", "1f1b")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary positions, for texts longer than it was first trained on.

    Frequencies of a wavelength above `original_positions / low_frequency_factor` are divided by
    `factor`, those below `original_positions / high_frequency_factor` stay, and those between are
    interpolated (arXiv:2407.21783; `llama3` of Hugging Face's `rope_scaling`).
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a model, and how it is computed.

    `query_heads` is a multiple of `kv_heads`: that many query heads share a key and a value head.
    With `tied`, the output head is the embedding. `qkv_bias` adds biases to queries, keys and
    values; `qk_norm` normalizes each head of queries and keys (Qwen2 and Qwen3).

    With `experts`, each block has so many feed-forward layers beside its own, which every token
    passes, and sends a token to `experts_per_token` of them; without `shared_mlp` it has no other
    ones. `normalize_experts` makes the weights of a token's experts sum to one. An expert has room
    for `capacity_factor` times its even share of a device's tokens; those beyond pass it by
    (`math.inf`: room for all).

    Types are names in `DTYPES`: `dtype` is what activations and matrix products are computed in,
    `param_dtype` what parameters are kept in, `logits_dtype` what the head's product is computed
    in (None: `dtype`). `attention` is one of `models.attention.ATTENTIONS`.

    `document_end` is the token that ends each document of a packed row: attention does not cross
    it, and positions begin anew after it. None: a row is one document.

    `scan` keeps one copy of the block in the program; without it the layers are unrolled.
    `remat`, a name in `REMAT`, says what a block keeps for the backward pass; the rest is computed
    again. The loss holds the logits of `loss_chunk` positions at a time (0: all).

    On a mesh with stages, `stages` is the number of layers of each (empty: all equal), and a batch
    passes through them in `microbatches` parts; `pipeline`, a name in `PIPELINES`, is the order.
    """

    layers: int
    embed: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int = 256
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    normalize_experts: bool = False
    shared_mlp: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    logits_dtype: str | None = None
    attention: str = "auto"
    document_end: int | None = None
    scan: bool = True
    remat: str = "none"
    loss_chunk: int = 256
    stages: tuple[int, ...] = ()
    microbatches: int = 4
    pipeline: str = "gpipe"

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads can't share {self.kv_heads} key and value heads "
                "evenly: make query_heads a multiple of kv_heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs of values.")
        for name, valid in _NAMES.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, valid))}.")
        check_dtypes(self.dtype, self.param_dtype, self.logits_dtype)
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"a token can't go to {self.experts_per_token} of {self.experts} experts: make "
                "experts_per_token at least 1 and at most experts."
            )
        if not (self.experts or self.shared_mlp):
            raise ValueError("a block without experts needs its own layer: leave shared_mlp True.")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk {self.loss_chunk} is negative; 0 means all positions.")
        if self.stages and (sum(self.stages) != self.layers or min(self.stages) < 1):
            raise ValueError(
                f"stages {self.stages} don't divide {self.layers} layers: give each stage at least "
                f"one, and all together {self.layers}."
            )


# The fields of `Config` that are names, and their valid ones.
_NAMES = {
    "dtype": (*DTYPES,),
    "param_dtype": (*DTYPES,),
    "logits_dtype": (*DTYPES, None),
    "attention": ATTENTIONS,
    "remat": (*REMAT,),
    "pipeline": PIPELINES,
}

_large = partial(Config, dtype="bfloat16", remat="full")
_llama = partial(_large, kv_heads=8)
_llama31 = partial(_llama, vocab=128_256, rope_scaling=RopeScaling(factor=8.0))
_llama32 = partial(_llama, vocab=128_256, rope_scaling=RopeScaling(factor=32.0), tied=True)
_qwen = partial(_large, rope_theta=1e6, norm_epsilon=1e-6)
_qwen3 = partial(_qwen, head_dim=128, vocab=151_936, qk_norm=True)
# Qwen2 and Qwen3 at the sizes of `tiny` and `demo`.
_small = partial(Config, query_heads=4, kv_heads=2, rope_theta=1e6, norm_epsilon=1e-6, tied=True)
_small_qwen = partial(_small, qk_norm=True)

_1B: dict[str, Any] = {
    "layers": 16,
    "embed": 2048,
    "query_heads": 32,
    "head_dim": 64,
    "hidden": 8192,
}
_8B: dict[str, Any] = {
    "layers": 32,
    "embed": 4096,
    "query_heads": 32,
    "head_dim": 128,
    "hidden": 14336,
}

# Configs with a name of Meta or Alibaba are the published `config.json` of that model. `1b` and
# `8b` have the shapes of Llama 3.2 1B and Llama 3.1 8B over bytes, whose logits are smaller than
# activations. They are for timing, and recompute only cheap operations
# (docs/benchmarks/results.md).
CONFIGS: dict[str, Config] = {
    "tiny": Config(layers=2, embed=32, query_heads=4, kv_heads=2, head_dim=8, hidden=96),
    "demo": Config(layers=4, embed=128, query_heads=4, kv_heads=2, head_dim=32, hidden=352),
    "moe": Config(
        layers=4, embed=128, query_heads=4, kv_heads=2, head_dim=32, hidden=352, experts=8
    ),
    "tiny-qwen": _small_qwen(layers=2, embed=32, head_dim=16, hidden=96),
    "demo-qwen": _small_qwen(layers=4, embed=128, head_dim=64, hidden=352),
    "tiny-qwen2": _small(layers=2, embed=32, head_dim=8, hidden=96, qkv_bias=True),
    "1b": _llama(**_1B, loss_chunk=0, remat="dots"),
    "8b": _llama(**_8B, loss_chunk=0, remat="dots"),
    "llama-2-7b": _large(
        layers=32,
        embed=4096,
        query_heads=32,
        kv_heads=32,
        head_dim=128,
        hidden=11008,
        vocab=32_000,
        rope_theta=1e4,
    ),
    "llama-3-8b": _llama(**_8B, vocab=128_256),
    "llama-3.1-8b": _llama31(**_8B),
    "llama-3.2-1b": _llama32(**_1B, remat="dots"),
    "llama-3.2-3b": _llama32(layers=28, embed=3072, query_heads=24, head_dim=128, hidden=8192),
    "qwen2-7b": _qwen(
        layers=28,
        embed=3584,
        query_heads=28,
        kv_heads=4,
        head_dim=128,
        hidden=18944,
        vocab=152_064,
        qkv_bias=True,
    ),
    "qwen2.5-0.5b": _qwen(
        layers=24,
        embed=896,
        query_heads=14,
        kv_heads=2,
        head_dim=64,
        hidden=4864,
        vocab=151_936,
        qkv_bias=True,
        tied=True,
        remat="dots",
    ),
    "qwen3-0.6b": _qwen3(
        layers=28,
        embed=1024,
        query_heads=16,
        kv_heads=8,
        hidden=3072,
        tied=True,
        remat="dots",
    ),
    "qwen3-1.7b": _qwen3(
        layers=28,
        embed=2048,
        query_heads=16,
        kv_heads=8,
        hidden=6144,
        tied=True,
        remat="dots",
    ),
    "qwen3-8b": _qwen3(
        layers=36,
        embed=4096,
        query_heads=32,
        kv_heads=8,
        hidden=12288,
    ),
    "qwen3-30b-a3b": _qwen3(
        layers=48,
        embed=2048,
        query_heads=32,
        kv_heads=4,
        hidden=768,
        experts=128,
        experts_per_token=8,
        capacity_factor=math.inf,
        normalize_experts=True,
        shared_mlp=False,
    ),
}
