"""Files in deploy/: manifests against a schema, scripts with stand-ins for the launchers."""

import os
import pathlib
import stat
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from jaxhet import _clusters
from tests.support.jobs import ROOT

_DEPLOY = ROOT / "deploy"
_PRINT = """
import os
names = "PROCESS_ID", "ISLAND", "NUM_PROCESSES", "COORDINATOR_ADDRESS"
with open(os.environ["JAXHET_JOB_SECRET_FILE"]) as secret:
    print(*(os.environ["JAXHET_" + name] for name in names), len(secret.read()))
"""
# Each runs the command of every context, as often as it is told, one after the other.
_SRUN = """#!/bin/sh
group=0
while [ "${1#--}" != "$1" ]; do
  case $1 in --het-group=*) group=${1#*=} ;; esac
  shift
done
for i in 0 1; do SLURM_PROCID=$i "$@" | sed "s/^/group$group: /" || exit 1; done
"""
_SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && [ "$3" = "nv[0-1]" ] && printf 'nv0\\nnv1\\n'
"""
_MPIRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words, rank = sys.argv[1:], 0
while words:
    end = words.index(":") if ":" in words else len(words)
    context, words = words[:end], words[end + 1 :]
    count, kept = 0, {"PATH": os.environ["PATH"]}
    while context[0].startswith("-"):
        option, value, *context = context
        if option == "-np":
            count = int(value)
        if option == "-x":
            kept[value] = os.environ[value]
    for _ in range(count):
        subprocess.run(context, env={**kept, "OMPI_COMM_WORLD_RANK": str(rank)}, check=True)
        rank += 1
"""
# Runs the command here, as a login shell does.
_SSH = """#!/usr/bin/env python3
import os, subprocess, sys
*options, host, command = sys.argv[1:]
env = {"PATH": os.environ["PATH"], "HOST": host}
sys.exit(subprocess.run(["sh", "-c", command], cwd="/", env=env).returncode)
"""


_MANIFEST = yaml.safe_load((_DEPLOY / "kubernetes" / "jobset.yaml").read_text())
_JOBS = {job["name"]: job["template"]["spec"] for job in _MANIFEST["spec"]["replicatedJobs"]}
_ISLANDS = {name: job["completions"] for name, job in _JOBS.items() if name != "coordinator"}


def _host(name: str, index: int) -> str:
    """Name of a pod's host. Other pods reach it under the subdomain."""
    return f"{_MANIFEST['metadata']['name']}-{name}-0-{index}"


_ADDRESS = f"{_host('coordinator', 0)}.{_MANIFEST['spec']['network']['subdomain']}:7733"


def test_fields_of_the_manifest_are_known() -> None:
    for replicated in _MANIFEST["spec"]["replicatedJobs"]:
        assert replicated.get("replicas", 1) == 1  # they would number their pods alike
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**job, **replicated["template"]}, "1.36", strict=True)


@pytest.mark.parametrize("name", _JOBS)
def test_pods_have_what_a_job_needs(name: str) -> None:
    job = _JOBS[name]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert (job["completionMode"], job["parallelism"]) == ("Indexed", job["completions"])
    assert pod["restartPolicy"] == "Never"  # a process can't join the job again
    assert env["JAXHET_JOB_SECRET_FILE"] == "/run/jaxhet/secret"
    assert not mounted["/run/jaxhet"]["secret"]["defaultMode"] & 0o004  # jaxhet refuses it
    if name == "coordinator":
        islands = ",".join(f"{island}={count}" for island, count in _ISLANDS.items())
        options = ["--bind", "0.0.0.0:7733", "--islands", islands]
        assert (job["completions"], container["command"][:2]) == (1, ["jaxhet", "coordinator"])
        assert container["command"][2:] == options
        return
    assert container["command"][:3] == ["jaxhet", "run", "--"]
    assert env["JAXHET_COORDINATOR_ADDRESS"] == _ADDRESS
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # the runtime's has 64 MiB
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]  # RDMA pins memory
    assert any(key.endswith("/gpu") for key in container["resources"]["limits"])


def _environ(name: str, index: int) -> dict[str, str]:
    """Variables of a pod: from its manifest, and from JobSet."""
    entries = _JOBS[name]["template"]["spec"]["containers"][0]["env"]
    environ = {entry["name"]: entry["value"] for entry in entries if "value" in entry}
    annotations = {"jobset-name": _MANIFEST["metadata"]["name"], "replicatedjob-name": name}
    fields = {f"metadata.annotations['jobset.sigs.k8s.io/{k}']": v for k, v in annotations.items()}
    for entry in entries:
        if "valueFrom" in entry:
            environ[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return {**environ, "HOSTNAME": _host(name, index), "JOB_COMPLETION_INDEX": str(index)}


def test_pods_find_their_places_and_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    for island, index in ((island, i) for island, n in _ISLANDS.items() for i in range(n)):
        for variable in list(os.environ):
            if variable.startswith(("JAXHET_", "JOB")):
                monkeypatch.delenv(variable)
        for variable, value in _environ(island, index).items():
            monkeypatch.setenv(variable, value)
        config = _clusters.resolve()
        assert (config.island, config.island_process_id) == (island, index)
        assert config.launched  # no process starts another coordinator
        assert config.coordinator_address == _ADDRESS


# Scripts.


def _programs(folder: pathlib.Path, **programs: str) -> dict[str, str]:
    """An environment in which these programs come first."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAXHET_", "SLURM_", "OMPI_"))}
    return {**kept, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )


def test_slurm_script_numbers_the_processes_of_both_components(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "process.sh").write_text((_DEPLOY / "process.sh").read_text())
    env = {
        **_programs(tmp_path, srun=_SRUN, scontrol=_SCONTROL),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "nv[0-1]",
    }
    ended = _run(env, "bash", "deploy/slurm/job.sh", sys.executable, "-c", _PRINT)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        *(f"group0: {i} nvidia 4 nv0:7733 65" for i in (0, 1)),
        *(f"group1: {i} amd 4 nv0:7733 65" for i in (2, 3)),
    ]
    assert not list((tmp_path / "deploy").glob(".secret*"))


def test_slurm_script_hands_a_failure_on_and_is_for_sbatch(tmp_path: pathlib.Path) -> None:
    failing = '#!/bin/sh\n[ "$1" = --het-group=0 ] || exit 7'
    env = {
        **_programs(tmp_path, srun=failing, scontrol=_SCONTROL),
        "SLURM_JOB_ID": "7",
        "JAXHET_HERE": str(tmp_path),
    }
    ended = _run(env, "bash", "deploy/slurm/job.sh", "true")
    assert "no heterogeneous job: start it by sbatch" in ended.stderr
    groups = {f"SLURM_JOB_NUM_NODES_HET_GROUP_{i}": "1" for i in (0, 1)}
    env |= {**groups, "SLURM_JOB_NODELIST_HET_GROUP_0": "nv[0-1]"}
    assert _run(env, "bash", "deploy/slurm/job.sh", "true").returncode == 7


def test_mpi_script_numbers_the_processes_of_both_contexts(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o600)
    env = {**_programs(tmp_path, mpirun=_MPIRUN), "JAXHET_JOB_SECRET_FILE": str(secret)}
    ended = _run(env, "sh", "deploy/mpi/job.sh", "nv0,nv1", "amd0", sys.executable, "-c", _PRINT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "0 nvidia 3 nv0:7733 17",
        "1 nvidia 3 nv0:7733 17",
        "2 amd 3 nv0:7733 17",
    ]
    del env["JAXHET_JOB_SECRET_FILE"]
    refused = _run(env, "sh", "deploy/mpi/job.sh", "nv0", "amd0", "true")
    assert refused.returncode != 0
    assert "openssl rand -hex 32" in refused.stderr


def test_ssh_script_starts_a_process_on_each_host(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "the secret"
    secret.write_text("0123456789abcdef\n")
    env = {**_programs(tmp_path, ssh=_SSH), "JAXHET_JOB_SECRET_FILE": str(secret)}
    code = f"{_PRINT}print(os.environ['HOST'], os.getcwd(), os.sys.argv[1:])"
    words = ["it's", 'a "b" $c\nd\n', ""]
    command = [sys.executable, "-c", code, *words]
    ended = _run(env, "sh", "deploy/ssh/job.sh", "nv0,nv1", "amd0", *command)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sorted(line for line in lines if "7733" in line) == [
        "0 nvidia 3 nv0:7733 17",
        "1 nvidia 3 nv0:7733 17",
        "2 amd 3 nv0:7733 17",
    ]
    assert sorted(line for line in lines if "7733" not in line) == [
        f"{host} {ROOT} {words}" for host in ("amd0", "nv0", "nv1")
    ]
    failing = [sys.executable, "-c", "import os; exit(int(os.environ['JAXHET_PROCESS_ID']))"]
    assert _run(env, "sh", "deploy/ssh/job.sh", "nv0", "amd0", *failing).returncode == 1
    del env["JAXHET_JOB_SECRET_FILE"]
    assert "openssl rand -hex 32" in _run(env, "sh", "deploy/ssh/job.sh", "a", "b", "c").stderr


@pytest.mark.parametrize(
    "variable",
    ["JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"],
)
def test_process_script_adds_the_index_of_each_launcher(
    variable: str, tmp_path: pathlib.Path
) -> None:
    env = {**_programs(tmp_path), variable: "3"}
    names = ("PROCESS_ID", "ISLAND", "AUTO")
    code = f"import os; print(*(os.environ['JAXHET_' + name] for name in {names}))"
    command = ("sh", "deploy/process.sh", "amd", "2", sys.executable, "-c", code)
    ended = _run(env, *command)
    assert ended.stdout == "5 amd 1\n", ended.stderr
    assert _run({**env, "JAXHET_AUTO": "0"}, *command).stdout == "5 amd 0\n"


def test_process_script_by_nobody_says_so(tmp_path: pathlib.Path) -> None:
    ended = _run(_programs(tmp_path), "sh", "deploy/process.sh", "amd", "0", "true")
    assert ended.returncode == 2
    assert "start it by Slurm, MPI or Kubernetes" in ended.stderr


def test_scripts_are_written_for_people_to_run() -> None:
    for path in _DEPLOY.rglob("*.sh"):
        assert path.stat().st_mode & stat.S_IRUSR
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
