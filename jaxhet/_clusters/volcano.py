"""Volcano Job of Kubernetes: each task is an island, but for one named `coordinator`.

Its `env` plugin gives VC_TASK_INDEX, its `svc` plugin VC_<TASK>_HOSTS of each task and the host
name of the pod, which is in one of them.
"""

import re

from jaxhet._clusters import kubernetes
from jaxhet._clusters.cluster import Environ, Finding, Found, Scheduler, in_island, number
from jaxhet._errors import UsageError

_INDEX, _NAME = "VC_TASK_INDEX", "HOSTNAME"
_HOSTS = re.compile(r"VC_(\w+)_HOSTS")


def _find(environ: Environ) -> Found:
    tasks = {
        match[1].lower(): environ[name].split(",")
        for name in sorted(environ)
        if (match := _HOSTS.fullmatch(name)) and environ[name]
    }
    pod = environ.get(_NAME, "")
    own = next((t for t, names in tasks.items() if pod in (n.split(".")[0] for n in names)), None)
    if own is None:
        raise UsageError(
            f"{_NAME}={pod} is not in any VC_<TASK>_HOSTS"
            f" ({', '.join(tasks) or 'no such variable is set'}):"
            " give the job Volcano's plugins env and svc"
        )
    sizes = {t: len(names) for t, names in tasks.items() if t != kubernetes.COORDINATOR}
    runs_apart = kubernetes.COORDINATOR in tasks
    first = kubernetes.COORDINATOR if runs_apart else next(iter(sizes))
    source = f"VC_{first.upper()}_HOSTS"
    found = {"coordinator_address": kubernetes.address(environ, tasks[first][0], source)}
    if runs_apart:
        found["launched"] = Finding(True, source)
    if own == kubernetes.COORDINATOR:
        return found
    index = number(environ, _INDEX)
    return {**in_island(sizes, own, index, f"VC_<TASK>_HOSTS, {_NAME}, {_INDEX}"), **found}


SCHEDULER = Scheduler(
    "volcano",
    "Volcano",
    (_INDEX,),
    "give the job Volcano's plugins env and svc",
    _find,
)
