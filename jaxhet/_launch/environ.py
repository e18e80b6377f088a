"""Environment in which a launcher starts a process of a job."""

from collections.abc import Mapping, Sequence

from jaxhet import _config
from jaxhet._launch import gpus as _gpus

# Must be set before a process starts: large buffers then lie in huge pages, which are copied
# faster, above all from a peer's memory. Needs glibc 2.35.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def complete(
    base: Mapping[str, str], assigned: Mapping[str, str], wanted: Sequence[int | None], index: int
) -> dict[str, str]:
    """The whole environment of a process: defaults, the user's variables, the launcher's.

    Args:
      base: The user's environment on this host; wins over defaults.
      assigned: The launcher's variables. They replace all others except those that select GPUs.
      wanted: Devices of each of the job's processes on this host; None: an equal share of the GPUs,
        or as many CPU devices as the program says.
      index: Index of the process among them.

    Raises:
      UsageError: The host has too few GPUs.
    """
    own = {
        "PYTHONUNBUFFERED": "1",  # output before a kill is shown
        "JAXHET_AUTO": "1",  # jax.distributed.initialize of an unmodified program joins the job
        **_config.for_new_job(base),
        **assigned,
    }
    gpus = _gpus.find(base)
    if gpus is None:
        devices = {} if wanted[index] is None else {"JAXHET_CPU_DEVICES": str(wanted[index])}
        return {"JAX_PLATFORMS": "cpu", **_HUGE_PAGES, **own, **devices}
    sizes = [size or 1 for size in wanted] if any(wanted) else None
    return {**own, **gpus.environment(_gpus.share(gpus, sizes, len(wanted))[index])}
