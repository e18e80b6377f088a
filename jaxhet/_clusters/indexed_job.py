"""An Indexed Job of Kubernetes; a Job for each island.

The pod knows its index only: the rest is given, since JAX's way, to ask Kubernetes' API, needs a
service account with rights, and finds one Job.
"""

from jaxhet._clusters import kubernetes
from jaxhet._clusters.cluster import Environ, Finding, Found, Scheduler, number

_SERVICE = "KUBERNETES_SERVICE_HOST"


def _find(environ: Environ) -> Found:
    index = number(environ, kubernetes.INDEX)
    return {"island_process_id": Finding(index, kubernetes.INDEX)}


SCHEDULER = Scheduler(
    "indexed_job",
    "an Indexed Job of Kubernetes",
    (_SERVICE, kubernetes.INDEX),
    'set completionMode: "Indexed" of the Job',
    _find,
)
