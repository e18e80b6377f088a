"""Ordered table of schedulers, and the options that the first detected one sets."""

import os
from collections.abc import Mapping
from typing import Any

from jaxhet import _config
from jaxhet._clusters import jax_variables, jobset, open_mpi, slurm
from jaxhet._clusters.cluster import Environ, Found
from jaxhet._errors import UsageError

# Open MPI's mpirun may run inside a Slurm allocation, whose variables then describe its daemons: it
# precedes Slurm.
SCHEDULERS = tuple(module.SCHEDULER for module in (open_mpi, slurm, jobset))
# Values of `cluster_detection_method` in jax.distributed.initialize → the schedulers they select.
METHODS: dict[str, tuple[str, ...]] = {
    **{scheduler.name: (scheduler.name,) for scheduler in SCHEDULERS},
    "mpi4py": ("ompi",),
    "k8s": ("jobset",),
    "deactivate": (),
}


def detect(environ: Environ, method: str | None = None) -> Found:
    """Finds the first scheduler that started this process; pure.

    Args:
      environ: The environment.
      method: A key of `METHODS`; None: any scheduler.

    Returns:
      Options found in environment variables other than JAXHET_*.

    Raises:
      UsageError: No such method, it is not the one that started this process, or variables
        contradict each other.
    """
    if method is not None and method not in METHODS:
        raise UsageError(
            f"cluster_detection_method={method!r} is not one of {', '.join(sorted(METHODS))}"
        )
    candidates = [s for s in SCHEDULERS if method is None or s.name in METHODS[method]]
    own = jax_variables.find(environ)
    for scheduler in candidates:
        if scheduler.is_present(environ):
            return {**scheduler.find(environ), **own}
    if candidates and method is not None:
        names = "; or ".join(f"{', '.join(s.variables)} ({s.title})" for s in candidates)
        raise UsageError(
            f"cluster_detection_method={method!r}: this process was not started that way;"
            f" it would have {names}"
        )
    return own


def resolve(
    arguments: Mapping[str, Any] | None = None, environ: Environ = os.environ
) -> _config.Config:
    """Options by precedence: argument, JAXHET_*, JAX's own variables, the scheduler, default.

    A scheduler is asked only where JAXHET_* leave the job open; `jaxhet launch` leaves nothing but
    the partition, which JAX's own variable may say.

    Raises:
      UsageError: A value is not valid.
    """
    config = _config.resolve(arguments, environ)
    if _says_all(config):
        own = jax_variables.find(environ)
        return config.filled({k: v for k, v in own.items() if k == "partition_index"})
    found = detect(environ, config.cluster_detection_method)
    if "islands" in found and not config.given.isdisjoint(("island", "islands")):
        replaced = ("islands", "island", "island_process_id")
        found = {k: v for k, v in found.items() if k not in replaced}
    return config.filled(found)


def _says_all(config: _config.Config) -> bool:
    place = (config.num_processes, config.process_id)
    in_island = (config.island, config.island_process_id)
    return config.coordinator_address is not None and (None not in place or None not in in_island)
