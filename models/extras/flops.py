"""Floating-point operations of a training step, and peak rates of devices: pure, without JAX."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.configs import Config

# Dense operations per second (without sparsity) of a JAX device, by a word of its `device_kind` and
# the type that is computed in. Sources: the vendors' data sheets; A100, H100 and H200 as SXM, B200
# as in an HGX. A JAX device of MI250X is one of its two dies (GCD): half of the sheet's 383e12.
PEAKS = {
    ("A100", "bfloat16"): 312e12,
    ("H100", "bfloat16"): 989.4e12,
    ("H200", "bfloat16"): 989.4e12,
    ("B200", "bfloat16"): 2250e12,
    ("MI250X", "bfloat16"): 191.5e12,
    ("MI300X", "bfloat16"): 1307.4e12,
    ("MI325X", "bfloat16"): 1307.4e12,
}


def model_flops(
    parameters: int, layers: int, heads: int, head_dim: int, tokens: int, seq: int
) -> float:
    """Floating-point operations of a decoder's training step, without recomputed ones.

    Each parameter of a matrix is multiplied and added once for a token forward and twice backward:
    6 N. Causal attention adds 6 x layers x heads x head_dim x seq: two products of half a matrix
    [seq, seq] for each head, three times (PaLM, arXiv:2204.02311, appendix B, counts all of it).

    Args:
      parameters: N, without the table of embeddings, which is looked up and not multiplied.
      layers: number of attention layers.
      heads: number of query heads.
      head_dim: size of a head.
      tokens: number of tokens in a step, over all devices.
      seq: positions of a row.
    """
    return tokens * (6.0 * parameters + 6.0 * layers * heads * head_dim * seq)


def config_flops(config: "Config", tokens: int, seq: int) -> float:
    """`model_flops` of a step with a config; of a mixture, of the experts that a token passes.

    Args:
      config: Shape of the model. A tied table of embeddings counts as the matrix of the last
        product.
      tokens: number of tokens in a step, over all devices.
      seq: positions of a row.
    """
    attention = config.embed * config.head_dim * 2 * (config.query_heads + config.kv_heads)
    feed_forward = 3 * config.embed * config.hidden
    experts = config.experts_per_token if config.experts else 0
    router = config.embed * config.experts
    block = attention + (config.shared_mlp + experts) * feed_forward + router
    matrices = config.layers * block + config.embed * config.vocab
    return model_flops(matrices, config.layers, config.query_heads, config.head_dim, tokens, seq)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device, from `PEAKS`; None for one that is not in the table."""
    words = re.split(r"[^A-Za-z0-9]+", device_kind)
    return next((p for (name, type_), p in PEAKS.items() if name in words and type_ == dtype), None)
