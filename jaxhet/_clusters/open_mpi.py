"""Open MPI 4 and 5: `mpirun`, also with contexts separated by `:`, each of which is an island.

Process 0 runs where `mpirun` does. Open MPI 4 (ORTE) says how to reach `mpirun`; Open MPI 5 (PRRTE)
names its host and pid in PMIX_NAMESPACE, as in `prterun-node1-4711@1`. Sources: JAX's
`ompi_cluster.py`; `schizo_ompi.c` of Open MPI 4 and `pmdl_ompi.c` of PMIx for the contexts.
"""

import itertools
import re

from jaxhet._clusters.cluster import (
    Environ,
    Found,
    Scheduler,
    address,
    in_island,
    number,
    numbers,
    own_gpu,
    port_of,
)
from jaxhet._errors import UsageError

_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_CONTEXT_SIZES = "OMPI_APP_CTX_NUM_PROCS"
_ORTE_URI, _NAMESPACE = "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"
_ORTE = re.compile(r"(\d+)\.\d+;.*?(?:tcp://([^,:;]+)|tcp6://(\[[^,\]]+))")
_PRRTE = re.compile(r"prte(?:run)?-(.+)-(\d+)@\d+")


def _find(environ: Environ) -> Found:
    found = {
        **own_gpu(environ, _LOCAL_RANK, _processes_here(environ)),
        **_contexts(environ),
        "num_processes": number(environ, _SIZE),
        "process_id": number(environ, _RANK),
    }
    coordinator = _coordinator(environ)
    return {**found, "coordinator_address": coordinator} if coordinator else found


def _processes_here(environ: Environ) -> int:
    return number(environ, _LOCAL_SIZE) if environ.get(_LOCAL_SIZE) else 1


def _contexts(environ: Environ) -> Found:
    """A process's island is its context of `mpirun`, if there are several contexts."""
    if not environ.get(_CONTEXT_SIZES):
        return {}
    sizes = numbers(environ, _CONTEXT_SIZES)
    rank, size = number(environ, _RANK), number(environ, _SIZE)
    if len(sizes) == 1:
        return {}
    if sum(sizes) != size:
        raise UsageError(
            f"{_CONTEXT_SIZES}={environ[_CONTEXT_SIZES]!r} does not sum up to {_SIZE}={size}"
        )
    ends = list(itertools.accumulate(sizes))
    context = next(i for i, end in enumerate(ends) if rank < end)
    named = {f"context{i}": n for i, n in enumerate(sizes)}
    index = rank - (ends[context] - sizes[context])
    return in_island(named, f"context{context}", index)


def _coordinator(environ: Environ) -> str | None:
    if match := _ORTE.match(environ.get(_ORTE_URI, "")):
        job, ipv4, ipv6 = match.groups()
        host = ipv4 or f"{ipv6}]"
        return address(environ, host, port_of(int(job) >> 12))  # jobs differ above 12 bits
    if match := _PRRTE.match(environ.get(_NAMESPACE, "")):
        return address(environ, match[1], port_of(int(match[2])))
    return None


SCHEDULER = Scheduler(
    "ompi",
    "Open MPI",
    (_RANK, _SIZE, _LOCAL_RANK),
    _find,
)
