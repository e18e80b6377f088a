"""Proofs of `jaxhet doctor --qualify`, and the description of its report.

The JSON object is a `Qualification`; `report.py` has the rules.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

SCHEMA = 3
_STATES = ("failed", "refused", "proven")  # worst first


@dataclasses.dataclass(frozen=True)
class Swap:
    """Measurement of two processes that sent `num_bytes` to each other, several times.

    Attributes:
      num_bytes: Bytes in each direction.
      repeats: Number of swaps.
      p50_us: Median time of a swap of both directions, through jit. Other pairs swap as well.
      gb_per_s: `num_bytes` divided by that time, in 1e9 B/s, with both directions busy.
    """

    num_bytes: int
    repeats: int
    p50_us: float
    gb_per_s: float


@dataclasses.dataclass(frozen=True)
class Proof:
    """One transport between two processes.

    Attributes:
      transport: Name of the transport.
      state: "proven": all bytes of all sizes arrived, unchanged, on both sides; "refused": the
        devices can't use it, so that a job would take the next one; "failed": a job would take it,
        and it does not work.
      reason: Message of each side, if the transport is not proven.
      swaps: Measurements by the lower one of the two processes.
    """

    transport: str
    state: Literal["proven", "refused", "failed"]
    reason: str
    swaps: tuple[Swap, ...]


def worst(proofs: Iterable[Proof]) -> Proof:
    """The first of the proofs with the worst state."""
    return min(proofs, key=lambda proof: _STATES.index(proof.state))


@dataclasses.dataclass(frozen=True)
class PairProof:
    """Two processes, and all pairs of their devices.

    Attributes:
      processes: Ids of the processes.
      hosts: Names of their hosts.
      same_host: Whether they run on one host, and can see each other there.
      platforms: JAX's names of the platforms of their devices, as "cpu" or "cuda". The proofs are
        about these devices only.
      proofs: Proof of each transport that the options allow and that is for such devices, best
        first.
    """

    processes: tuple[int, int]
    hosts: tuple[str, str]
    same_host: bool
    platforms: tuple[str, str]
    proofs: tuple[Proof, ...]


@dataclasses.dataclass(frozen=True)
class Qualification:
    """The report of `jaxhet doctor --qualify`.

    Attributes:
      schema: `SCHEMA`; changes when a field is removed or gets another meaning.
      ok: Whether every pair has a proven transport, and none failed.
      versions: Versions of jax, jaxlib and jaxhet, the same everywhere.
      written: Time by the clock of process 0, such as 2026-07-31 09:30 UTC.
      pairs: All pairs of processes.
    """

    schema: int
    ok: bool
    versions: dict[str, str]
    written: str
    pairs: tuple[PairProof, ...]
