"""Helpers shared by the kinds of Kubernetes jobs."""

from jaxhet._clusters.cluster import Environ, Finding, number

COORDINATOR = "coordinator"  # the task, or replicated job, that runs `jaxhet coordinator`
INDEX = "JOB_COMPLETION_INDEX"  # a pod's number in an Indexed Job
_PORT, _DEFAULT_PORT = "JAX_COORDINATOR_PORT", 55527  # JAX's in Kubernetes


def address(environ: Environ, host: str, source: str) -> Finding:
    """The coordinator's address on a host that the job knows by name."""
    if environ.get(_PORT):
        return Finding(f"{host}:{number(environ, _PORT)}", f"{source}, {_PORT}")
    return Finding(f"{host}:{_DEFAULT_PORT}", source)
