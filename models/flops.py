"""Floating-point operations of a training step, and what a device could do: pure, without JAX."""

import re

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
    """Floating-point operations of a training step of a decoder, without what is computed twice.

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


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device, from `PEAKS`; None for one that is not in the table."""
    words = re.split(r"[^A-Za-z0-9]+", device_kind)
    return next((p for (name, type_), p in PEAKS.items() if name in words and type_ == dtype), None)
