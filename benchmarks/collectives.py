"""Formulas of the benchmarks that nccl-tests lacks: pure, without JAX."""


def across_factor(collective: str, num_devices: int) -> float:
    """Bytes that a rank must send to the other of two equal islands / the size.

    Each island first sums, or sends once, what its ranks share: an all-reduce sends a rank's share
    of the island's sum. With one device in each island it is the factor of busbw.
    """
    n = num_devices
    return {
        "all_reduce": 2 / n,
        "all_gather": 1 / n,
        "reduce_scatter": 1 / n,
        "all_to_all": 1 / 2,
        "permute": 1.0,
    }[collective]
