"""JobSet of Kubernetes: each replicated job is an island, and one named `coordinator` runs it.

A pod's manifest gives JOBSET_NAME and REPLICATED_JOB_NAME by the downward API, from the annotations
`jobset.sigs.k8s.io/jobset-name` and `…/replicatedjob-name`, as is usual with JobSet; Kubernetes
gives JOB_COMPLETION_INDEX. The sizes of islands are announced to the coordinator.
"""

from jaxhet._clusters.cluster import Environ, Found, Scheduler, address, number
from jaxhet._errors import UsageError

_SET, _JOB, _REPLICA = "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"
_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 55527  # JAX's in Kubernetes


def _find(environ: Environ) -> Found:
    if environ.get(_REPLICA) and number(environ, _REPLICA) > 0:
        raise UsageError(
            f"{_REPLICA}={environ[_REPLICA]}: replicated job {environ[_JOB]} has several replicas,"
            " and nothing tells how many pods each has; set replicas: 1 and raise its parallelism,"
            " or set JAXHET_ISLAND_PROCESS_ID"
        )
    host = f"{environ[_SET]}-coordinator-0-0.{environ[_SET]}"
    return {
        "coordinator_address": address(environ, host, _PORT),
        "launched": True,
        "island": environ[_JOB],
        "island_process_id": number(environ, _INDEX),
    }


SCHEDULER = Scheduler(
    "jobset",
    "JobSet",
    (_SET, _JOB, _INDEX),
    _find,
)
