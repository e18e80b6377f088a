"""Slurm: `srun`, plain or in a heterogeneous job, each component of which is an island.

Process 0 runs on the first node of the step; of a heterogeneous job, on the first node of component
0. One `srun` may run on several components, and numbers their tasks through, or each component has
its own. Sources: JAX's `slurm_cluster.py`; sbatch(1), srun(1); `_exec_task` of slurmstepd adds the
offsets of a component to SLURM_PROCID and SLURM_NODEID.
"""

import re

from jaxhet._clusters.cluster import (
    Environ,
    Found,
    Scheduler,
    address,
    in_island,
    number,
    own_gpu,
    port_of,
)
from jaxhet._errors import UsageError

_JOB, _NODES = "SLURM_JOB_ID", "SLURM_STEP_NODELIST"
_SIZE, _RANK, _LOCAL_RANK = "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"
_NODE, _NODE_ID = "SLURMD_NODENAME", "SLURM_NODEID"
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_COMPONENTS = "SLURM_HET_SIZE"
_COMPONENT_NODES = "SLURM_JOB_NODELIST_HET_GROUP_{}"
_COMPONENT_TASKS = "SLURM_TASKS_PER_NODE_HET_GROUP_{}"
_GROUP = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")


def hosts(node_list: str) -> list[str]:
    """The hosts of a list such as `gpu[001-003,7],login`."""
    names = []
    for group in _GROUP.findall(node_list):
        prefix, bracket, rest = group.partition("[")
        ranges, _, suffix = rest.partition("]")
        if not bracket:
            names.append(group)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += [
                f"{prefix}{n:0{len(first)}d}{end}" for n in numbers for end in hosts(suffix) or [""]
            ]
    return names


def task_counts(text: str) -> list[int]:
    """The tasks of each node, from text such as `4(x2),3`."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"{text!r} is no list of Slurm's tasks per node, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _find(environ: Environ) -> Found:
    here = max(task_counts(environ[_TASKS])) if environ.get(_TASKS) else 1
    gpu = own_gpu(environ, _LOCAL_RANK, here)
    if environ.get(_COMPONENTS) and number(environ, _COMPONENTS) > 1:
        return {**gpu, **_find_in_component(environ)}
    first = hosts(environ[_NODES])[0]
    return {
        "coordinator_address": address(environ, first, port_of(number(environ, _JOB))),
        "num_processes": number(environ, _SIZE),
        "process_id": number(environ, _RANK),
        **gpu,
    }


def _find_in_component(environ: Environ) -> Found:
    names = [f"component{i}" for i in range(number(environ, _COMPONENTS))]
    nodes = [hosts(_required(environ, _COMPONENT_NODES.format(i))) for i in range(len(names))]
    tasks = [task_counts(_required(environ, _COMPONENT_TASKS.format(i))) for i in range(len(names))]
    sizes = dict(zip(names, map(sum, tasks), strict=True))
    step, node = hosts(environ[_NODES]), _required(environ, _NODE)
    component = next((i for i, own in enumerate(nodes) if node in own), None)
    if component is None:
        raise UsageError(f"{_NODE}={node} is in none of the {len(names)} components of the job")
    index = number(environ, _RANK)
    others = set(step) - set(nodes[component])
    if others or step.index(node) != number(environ, _NODE_ID):  # numbered through
        index -= sum(list(sizes.values())[:component])
    if not 0 <= index < sizes[names[component]]:
        raise UsageError(
            f"{_RANK}={environ[_RANK]} is not a task of component {component}, to which"
            f" {_COMPONENT_TASKS.format(component)} gives {sizes[names[component]]}: start as many"
            " with srun, or announce the islands' sizes yourself (JAXHET_ISLANDS, JAXHET_ISLAND,"
            " JAXHET_ISLAND_PROCESS_ID)"
        )
    return {
        **in_island(sizes, names[component], index),
        "coordinator_address": address(environ, nodes[0][0], port_of(number(environ, _JOB))),
    }


def _required(environ: Environ, name: str) -> str:
    if not environ.get(name):
        raise UsageError(
            f"a heterogeneous job of Slurm ({_COMPONENTS}={environ[_COMPONENTS]}) without {name}:"
            " start it with sbatch or salloc, and the program in it with srun --het-group"
        )
    return environ[name]


SCHEDULER = Scheduler(
    "slurm",
    "Slurm",
    (_JOB, _NODES, _SIZE, _RANK, _LOCAL_RANK),
    _find,
)
