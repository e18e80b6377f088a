"""The passes' view of the job, and the user's options."""

import dataclasses
from typing import Literal

# Settings (`compiler_options` or flags) with which XLA overlaps exchanges with compute.
OVERLAP_LIMIT = 32
GPU_COMPILER_OPTIONS: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Starts that may be without their dones at a time; 1 by default.
    "xla_gpu_experimental_parallel_collective_overlap_limit": OVERLAP_LIMIT,
}


@dataclasses.dataclass(frozen=True)
class Job:
    """The devices of a job as the compiler sees them.

    Attributes:
      device_ids: Rank to global device id, increasing.
      islands: Rank to index of its island.
      platform: Platform that modules are compiled for; selects the form of the exchanges.
      session: Key of the live engine; the exchange calls carry it.
      has_one_platform: Whether all islands have this platform. One compiler then writes all
        modules, and what it makes of an operation may tell two collectives apart.
    """

    device_ids: tuple[int, ...]
    islands: tuple[int, ...]
    platform: str = "cpu"
    session: int = 0
    has_one_platform: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether modules have the GPU form: start/done pairs, arithmetic left to XLA's fusion."""
        return self.platform != "cpu"


@dataclasses.dataclass(frozen=True)
class Options:
    """How collectives are decomposed. They must be equal on all processes.

    Attributes:
      algorithm: "flat" (every rank exchanges with every other of its group), "hierarchical" (local
        reduce-scatter, exchange over the rail, local all-gather; groups that are not symmetric
        stay flat) or "auto" (hierarchical on GPUs, flat on CPUs).
      two_shot_bytes: On CPUs, an all-reduce of at most this many bytes is one all-gather and local
        sums. A larger one is a reduce-scatter and an all-gather; of two ranks, a permute and a sum.
      bucket_bytes: On GPUs, largest size of a bucket of small all-reduces (`bucket.py`); 0: no
        buckets.
      part_bytes: On GPUs, least size of a part of an all-reduce of two ranks. It has up to eight
        parts, and each is summed while the next one is received; 0: no parts.
      pipeline_iterations: On GPUs, least number of iterations of loops that are pipelined
        (`pipeline.py`); 0: no loop is.
      one_world_kernels: On GPUs, XLA should compile the same kernels as for one world, so that
        results can have the same bits. Barriers keep XLA from fusing the replacement of a
        collective with other operations, two ranks add in the shape of the operand, and no loop is
        pipelined.
      wire: Codecs (`codecs.py`) of exchanges, by mesh axis; "" stands for axes without an entry.
      needed_axes: Axes that the meshes of each program with exchanges must have.
      deadline_ms: Longest wait of an exchange for its peers; 0 is the session's default.
    """

    algorithm: Literal["auto", "flat", "hierarchical"] = "auto"
    two_shot_bytes: int = 64 * 1024
    bucket_bytes: int = 256 * 1024
    part_bytes: int = 32 << 20
    pipeline_iterations: int = 8
    one_world_kernels: bool = False
    wire: tuple[tuple[str, str], ...] = ()
    needed_axes: tuple[str, ...] = ()
    deadline_ms: int = 0
