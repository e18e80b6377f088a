"""XLA's tuning of kernels: whether jaxhet controls it, and the folder of its results.

Processes with equal GPUs share executables (`shared_programs.py`), so that only one of them tunes.
With JAX's persistent compilation cache, XLA keeps a file for each kernel beside it: a program that
was changed is compiled again, but most of its kernels are not tuned again.
"""

import pathlib
from collections.abc import Mapping

FOLDER_FLAG = "xla_gpu_per_fusion_autotune_cache_dir"
# Flags by which users control tuning themselves.
OWN_FLAGS = (FOLDER_FLAG, "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from")
LEVEL_FLAG = "xla_gpu_autotune_level"


def is_users(flags: Mapping[str, str]) -> bool:
    """Whether the user controls tuning, by flags of XLA."""
    return flags.get(LEVEL_FLAG) == "0" or any(name in flags for name in OWN_FLAGS)


def folder(process: int, cache_folder: str | None) -> pathlib.Path | None:
    """The folder of this process's tuning results; created if it does not exist.

    Each process has its own: XLA may read a file while another process writes it.

    Args:
      process: This process.
      cache_folder: JAX's persistent compilation cache.

    Returns:
      The folder; None without a cache on this machine.
    """
    if not cache_folder or "://" in cache_folder:
        return None
    path = pathlib.Path(cache_folder) / "jaxhet_autotune" / f"process{process}"
    path.mkdir(parents=True, exist_ok=True)
    return path
