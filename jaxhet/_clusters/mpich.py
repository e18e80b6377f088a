"""MPICH, Intel MPI and others whose `mpiexec` is Hydra.

No variable of Hydra tells where rank 0 runs, or to which of several contexts (separated by `:`) a
rank belongs: give the coordinator's address, and islands by `jaxhet run --island`, in each context.
"""

from jaxhet._clusters.cluster import Environ, Finding, Found, Scheduler, number, own_gpu

_RANK, _SIZE = "PMI_RANK", "PMI_SIZE"
# Only Hydra sets these two; `srun --mpi=pmi2` sets the other variables as well.
_LOCAL_RANK, _LOCAL_SIZE = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"


def _find(environ: Environ) -> Found:
    return {
        "num_processes": Finding(number(environ, _SIZE), _SIZE),
        "process_id": Finding(number(environ, _RANK), _RANK),
        **own_gpu(environ, _LOCAL_RANK, number(environ, _LOCAL_SIZE)),
    }


SCHEDULER = Scheduler(
    "mpich",
    "MPICH",
    (_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE),
    "start the program with MPICH's mpiexec",
    _find,
)
