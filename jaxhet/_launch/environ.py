"""The environment that a launcher starts a process of a job in."""

from collections.abc import Mapping, Sequence

from jaxhet import _config
from jaxhet._launch import gpus as _gpus

# Must be set before a process starts: large buffers then lie in huge pages, which are copied
# faster, above all from a peer's memory. Needs glibc 2.35.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def complete(
    base: Mapping[str, str],
    assigned: Mapping[str, str],
    devices: int | None,
    gpus: Mapping[str, str] | None,
) -> dict[str, str]:
    """The whole environment of a process: defaults, the user's variables, the launcher's. Pure.

    Args:
      base: The user's environment; wins over defaults.
      assigned: Variables that the launcher sets; win over all others.
      devices: Number of virtual CPU devices, where `gpus` is None; None: the program's own.
      gpus: Variables that give the process its GPUs; None: it uses CPUs.
    """
    return {
        **({"JAX_PLATFORMS": "cpu", **_HUGE_PAGES} if gpus is None else {}),
        "PYTHONUNBUFFERED": "1",  # output before a kill is shown
        "JAXHET_AUTO": "1",  # jax.distributed.initialize of an unmodified program joins the job
        **_config.for_new_job(base),
        **assigned,
        **({"JAXHET_CPU_DEVICES": str(devices)} if devices is not None and gpus is None else {}),
        **(gpus or {}),
    }


def share(
    base: Mapping[str, str], wanted: Sequence[int | None], index: int
) -> tuple[int | None, dict[str, str] | None]:
    """Devices of one of several processes that share this host, and the variables of its GPUs.

    Args:
      base: The process's environment.
      wanted: Devices of each of these processes; None: an equal share of the GPUs, or as many CPU
        devices as the program says.
      index: Index of the process among them.

    Returns:
      The arguments `devices` and `gpus` of `complete`.

    Raises:
      UsageError: The host has too few GPUs.
    """
    gpus = _gpus.find(base)
    if gpus is None:
        return wanted[index], None
    sizes = [size or 1 for size in wanted] if any(wanted) else None
    mine = _gpus.share(gpus, sizes, len(wanted))[index]
    return len(mine), gpus.environment(mine)
