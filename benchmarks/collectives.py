"""Sizes and rates of collectives, most by the formulas of nccl-tests: pure, without JAX.

The size of a collective is the size of the larger of a rank's two buffers: the operand of
all-reduce, reduce-scatter, all-to-all and permute, and the result of all-gather.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: a call of one collective (`links` 0), or a program of a chain of them."""

    collective: str
    num_bytes: int
    links: int
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of a collective, and its rates at the median."""

    p50_us: float
    p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float


def timing(collective: str, num_bytes: int, num_devices: int, seconds: Sequence[float]) -> Timing:
    """p50 and p99; algbw = bytes / p50; busbw = algbw × the collective's factor; GB/s = 1e9 B/s."""
    p50, p99 = np.percentile(seconds, [50, 99])
    algbw = num_bytes / p50 / 1e9
    return Timing(p50 * 1e6, p99 * 1e6, algbw, algbw * busbw_factor(collective, num_devices))


def busbw_factor(collective: str, num_devices: int) -> float:
    """Ratio of the bytes that each rank must send to the size of the buffer (nccl-tests)."""
    n = num_devices
    if collective == "permute":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (n - 1) / n


def num_elements(num_bytes: int, itemsize: int, num_devices: int) -> int:
    """Elements of the larger buffer: at least one for each device, and a multiple of them."""
    return max(num_bytes // itemsize // num_devices, 1) * num_devices


def parse_size(text: str) -> int:
    """`16K` as a number of bytes.

    Raises:
      ValueError: The text is not a whole number with an optional K, M or G.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    return int(number) * _UNITS.get(unit, 1)


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
