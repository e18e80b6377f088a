"""Floating-point operations of a training step, and what a device could do: pure, without JAX."""

# Dense operations per second, by the name of a device and the type that is computed in (NVIDIA's
# data sheets, SXM).
PEAKS = {("H100", "bfloat16"): 989.4e12, ("H200", "bfloat16"): 989.4e12}


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
    found = (p for (name, type_), p in PEAKS.items() if name in device_kind and type_ == dtype)
    return next(found, None)
