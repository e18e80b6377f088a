"""JobSet of Kubernetes: each replicated job is an island, and one named `coordinator` runs it.

A pod's manifest gives JOBSET_NAME and REPLICATED_JOB_NAME by the downward API, from the annotations
`jobset.sigs.k8s.io/jobset-name` and `…/replicatedjob-name`, as is usual with JobSet; Kubernetes
gives JOB_COMPLETION_INDEX. The sizes of islands are announced to the coordinator.
"""

from jaxhet._clusters import kubernetes
from jaxhet._clusters.cluster import Environ, Finding, Found, Scheduler, number
from jaxhet._errors import UsageError

_SET, _JOB, _REPLICA = "JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX"


def _find(environ: Environ) -> Found:
    if environ.get(_REPLICA) and number(environ, _REPLICA) > 0:
        raise UsageError(
            f"{_REPLICA}={environ[_REPLICA]}: replicated job {environ[_JOB]} has several replicas,"
            " and nothing tells how many pods each has; set replicas: 1 and raise its parallelism,"
            " or set JAXHET_ISLAND_PROCESS_ID"
        )
    host = f"{environ[_SET]}-{kubernetes.COORDINATOR}-0-0.{environ[_SET]}"
    return {
        "coordinator_address": kubernetes.address(environ, host, _SET),
        "launched": Finding(True, _SET),
        "island": Finding(environ[_JOB], _JOB),
        "island_process_id": Finding(number(environ, kubernetes.INDEX), kubernetes.INDEX),
    }


SCHEDULER = Scheduler(
    "jobset",
    "JobSet",
    (_SET, _JOB, kubernetes.INDEX),
    "give the pods both names by the downward API, and completionMode: Indexed",
    _find,
)
