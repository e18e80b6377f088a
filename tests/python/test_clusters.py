"""Variables as schedulers set them, and what they say about a process's place in the job."""

from typing import Any

import pytest

from jaxhet import _clusters, _config
from jaxhet._clusters import slurm
from jaxhet._errors import UsageError

Environ = dict[str, str]

# srun -N2 -n4 python train.py: the last task. In a step, as srun(1) lists them.
SLURM: Environ = {
    "SLURM_JOB_ID": "5123",
    "SLURM_JOBID": "5123",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu008",
    "SLURM_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# sbatch -N2 -n2 : -N1 -n4, one srun --het-group=0,1: task 1 of component 1.
SLURM_HET: Environ = {
    **SLURM,
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "nv[01-02]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "amd9",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4",
    "SLURM_STEP_NODELIST": "amd9",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURMD_NODENAME": "amd9",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
# mpirun -np 3 of Open MPI 4.1: rank 2, alone on its host.
OPEN_MPI_4: Environ = {
    "OMPI_VERSION": "4.1.4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_APP_CTX_NUM_PROCS": "3",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_NUM_APP_CTX": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
    "PMIX_NAMESPACE": "1531576321",
}
# mpirun -np 2 a : -np 4 b of Open MPI 5.0: rank 3, the second of the second context.
OPEN_MPI_5: Environ = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_APP_CTX_NUM_PROCS": "2 4",
    "OMPI_FIRST_RANKS": "0 2",
    "OMPI_NUM_APP_CTX": "2",
    "PMIX_NAMESPACE": "prterun-nv-head-4711@1",
    "PMIX_RANK": "3",
}
KUBERNETES: Environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
JOBSET: Environ = {
    **KUBERNETES,
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "amd",
    "JOB_INDEX": "0",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-amd-0-1",
}


def _island(name: str, index: int, *islands: str) -> dict[str, Any]:
    return {"island": name, "island_process_id": index, "islands": islands}


def _job(process: int, num_processes: int, address: str) -> dict[str, Any]:
    return {
        "process_id": process,
        "num_processes": num_processes,
        "coordinator_address": address,
    }


_COMPONENTS = _island("component1", 1, "component0=2", "component1=4")
_CASES = {
    "slurm": (SLURM, {**_job(3, 4, "gpu007:62467"), "local_device_ids": (1,)}),
    "slurm, a GPU bound to each task": (
        {**SLURM, "CUDA_VISIBLE_DEVICES": "0"},
        _job(3, 4, "gpu007:62467"),
    ),
    "slurm, GPUs of the node": (
        {**SLURM, "ROCR_VISIBLE_DEVICES": "0,1"},
        {**_job(3, 4, "gpu007:62467"), "local_device_ids": (1,)},
    ),
    "slurm, a task for each node": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"},
        _job(3, 4, "gpu007:62467"),
    ),
    "slurm, one step for both components": (
        SLURM_HET,
        {**_job(3, 6, "nv01:62467"), **_COMPONENTS, "local_device_ids": (1,)},
    ),
    "slurm, a step that lists all nodes": (
        {**SLURM_HET, "SLURM_STEP_NODELIST": "nv[01-02],amd9"},
        {**_job(3, 6, "nv01:62467"), **_COMPONENTS, "local_device_ids": (1,)},
    ),
    "slurm, a step for each component": (
        {**SLURM_HET, "SLURM_NODEID": "0", "SLURM_PROCID": "1"},
        {**_job(3, 6, "nv01:62467"), **_COMPONENTS, "local_device_ids": (1,)},
    ),
    "open mpi 4": (OPEN_MPI_4, _job(2, 3, "10.96.0.1:62624")),
    "open mpi 4 over ipv6": (
        {
            **OPEN_MPI_4,
            "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370",
        },
        _job(2, 3, "[fe80::b9b:ac5d]:62880"),
    ),
    "open mpi 4 in a batch job of slurm": (
        {**SLURM, **OPEN_MPI_4},
        _job(2, 3, "10.96.0.1:62624"),
    ),
    "open mpi 5, two contexts": (
        OPEN_MPI_5,
        {
            **_job(3, 6, "nv-head:62055"),
            **_island("context1", 1, "context0=2", "context1=4"),
            "local_device_ids": (1,),
        },
    ),
    "srun with pmi2": (
        {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"},
        {**_job(3, 4, "gpu007:62467"), "local_device_ids": (1,)},
    ),
    "jobset": (
        JOBSET,
        {
            "coordinator_address": "train-coordinator-0-0.train:55527",
            "launched": True,
            "island": "amd",
            "island_process_id": 1,
        },
    ),
    "port of jax": (
        {**SLURM, "JAX_COORDINATOR_PORT": "7000", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
        _job(3, 4, "gpu007:7000"),
    ),
    "jax": (
        {
            "JAX_COORDINATOR_ADDRESS": "nv0:7",
            "JAX_COORDINATOR_BIND_ADDRESS": "[::]:7",
            "JAX_LOCAL_DEVICE_IDS": "0,1",
            "JAX_PARTITION_INDEX": "1",
        },
        {
            "coordinator_address": "nv0:7",
            "coordinator_bind_address": "[::]:7",
            "local_device_ids": (0, 1),
            "partition_index": 1,
        },
    ),
    "nothing": ({"HOME": "/", "HOSTNAME": "vm", **KUBERNETES}, {}),
}


@pytest.mark.parametrize("case", _CASES)
def test_variables_of_a_scheduler_are_understood(case: str) -> None:
    environ, expected = _CASES[case]
    assert _clusters.detect(environ) == expected


def test_every_scheduler_is_in_the_table_of_cases() -> None:
    for scheduler in _clusters.SCHEDULERS:
        assert any(scheduler.is_present(environ) for environ, _ in _CASES.values())


def test_port_is_that_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain JAX world and a job of jaxhet agree about where process 0 is."""
    from jax._src import clusters

    for environ, cluster in ((SLURM, clusters.SlurmCluster), (OPEN_MPI_4, clusters.OmpiCluster)):
        for name in {*SLURM, *OPEN_MPI_4}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        found = _clusters.detect(environ)
        theirs = cluster.get_coordinator_address(None, None)
        assert found["coordinator_address"] == theirs
        assert found["process_id"] == cluster.get_process_id()
        assert found["num_processes"] == cluster.get_process_count()


@pytest.mark.parametrize(
    ("environ", "change", "words"),
    [
        (SLURM, {"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "2x"}, "'2x' is no list of Slurm's tasks per node"),
        (
            SLURM_HET,
            {"SLURM_TASKS_PER_NODE_HET_GROUP_1": ""},
            r"\(SLURM_HET_SIZE=2\) without SLURM_TASKS_PER_NODE_HET_GROUP_1: start it with sbatch",
        ),
        (SLURM_HET, {"SLURMD_NODENAME": "tp0"}, "=tp0 is in none of the 2 components of the job"),
        (
            SLURM_HET,
            {"SLURM_PROCID": "7"},
            "SLURM_PROCID=7 is not a task of component 1, to which SLURM_TASKS_PER_NODE_HET_GROUP_1"
            " gives 4: start as many with srun",
        ),
        (
            OPEN_MPI_5,
            {"OMPI_APP_CTX_NUM_PROCS": "2 3"},
            "OMPI_APP_CTX_NUM_PROCS='2 3' does not sum up to OMPI_COMM_WORLD_SIZE=6",
        ),
        (JOBSET, {"JOB_INDEX": "1"}, "replicated job amd has several replicas"),
        ({}, {"JAX_LOCAL_DEVICE_IDS": "0,a"}, "JAX_LOCAL_DEVICE_IDS='a' is not a number"),
        (SLURM, {"JAX_COORDINATOR_PORT": "seven"}, "JAX_COORDINATOR_PORT='seven' is not a number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    environ: Environ, change: Environ, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        _clusters.detect({**environ, **change})


def test_arguments_then_jaxhet_then_jax_then_scheduler() -> None:
    environ = {**SLURM, "JAXHET_NUM_PROCESSES": "7", "JAX_COORDINATOR_ADDRESS": "nv0:9"}
    config = _clusters.resolve({"process_id": 6}, environ)
    assert (config.process_id, config.num_processes) == (6, 7)
    assert config.coordinator_address == "nv0:9"
    assert config.local_device_ids == (1,)


@pytest.mark.parametrize(
    "given",
    [
        {
            "JAXHET_COORDINATOR_ADDRESS": "a:1",
            "JAXHET_ISLAND": "amd",
            "JAXHET_ISLAND_PROCESS_ID": "0",
        },
        {
            "JAXHET_COORDINATOR_ADDRESS": "a:1",
            "JAXHET_NUM_PROCESSES": "2",
            "JAXHET_PROCESS_ID": "0",
        },
    ],
)
def test_launcher_inside_of_an_allocation_leaves_nothing_open_but_the_partition(
    given: Environ,
) -> None:
    environ = {**SLURM, **given}
    config = _clusters.resolve({}, environ)
    assert config == _config.resolve({}, environ)
    of_jax = {"JAX_PARTITION_INDEX": "2", "JAX_LOCAL_DEVICE_IDS": "1"}
    config = _clusters.resolve({}, {**environ, **of_jax})
    assert (config.local_device_ids, config.partition_index) == (None, 2)


def test_islands_of_the_user_replace_those_of_the_scheduler() -> None:
    config = _clusters.resolve({}, {**SLURM_HET, "JAXHET_ISLAND": "amd"})
    assert (config.island, config.islands, config.process_id) == ("amd", (), 3)


@pytest.mark.parametrize(
    ("method", "environ", "address"),
    [
        ("slurm", {**SLURM, **OPEN_MPI_4}, "gpu007:62467"),
        ("mpi4py", {**SLURM, **OPEN_MPI_5}, "nv-head:62055"),
        ("k8s", {**SLURM, **JOBSET}, "train-coordinator-0-0.train:55527"),
        ("deactivate", SLURM, None),
    ],
)
def test_method_chooses_the_scheduler(method: str, environ: Environ, address: str | None) -> None:
    found = _clusters.detect(environ, method)
    assert found.get("coordinator_address") == address


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "pbs",
            "cluster_detection_method='pbs' is not one of deactivate, jobset, k8s, mpi4py",
        ),
        ("slurm", "this process was not started that way; it would have SLURM_JOB_ID, SLURM_STEP"),
    ],
)
def test_wrong_method_is_refused(method: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _clusters.detect({}, method)


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("node001", ["node001"]),
        ("node001,host2", ["node001", "host2"]),
        ("node[001-003,007],host2", ["node001", "node002", "node003", "node007", "host2"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("nv-[9-11]-ib", ["nv-9-ib", "nv-10-ib", "nv-11-ib"]),
    ],
)
def test_node_list_is_expanded(node_list: str, hosts: list[str]) -> None:
    assert slurm.hosts(node_list) == hosts
