"""Errors in a Kubernetes manifest of a job, found without a cluster: fields first, then meaning.

Jobs go by the strict schema of the package kubernetes_validate. The schema of the JobSet itself is
below, with the fields that we use: any other field is a mistake.
"""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate

_VERSION = "1.36"
_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
_COUNT = {"type": "integer", "minimum": 0}
_METADATA = {
    "name": _NAME,
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
}


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


# jobset.x-k8s.io_jobsets.yaml of JobSet 0.8, v1alpha2.
_JOBSET = _closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_closed("name", **_METADATA),
    spec=_closed(
        "replicatedJobs",
        network=_closed(enableDNSHostnames={"type": "boolean"}, subdomain=_NAME),
        failurePolicy=_closed(maxRestarts=_COUNT),
        successPolicy=_closed("operator", operator={"enum": ["All", "Any"]}),
        suspend={"type": "boolean"},
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                "name template", name=_NAME, replicas=_COUNT, template={"type": "object"}
            ),
        },
    ),
)
COORDINATOR = "coordinator"
_SECRET_FILE = "/run/jaxhet/secret"
_DOWNWARD = {"JOBSET_NAME": "jobset-name", "REPLICATED_JOB_NAME": "replicatedjob-name"}

Pods = list[tuple[str, int, dict[str, Any]]]  # an island's name, its number of pods, their spec


def problems(manifest: Any) -> list[str]:
    """Errors in words; empty for a manifest that a cluster should run."""
    schema = jsonschema.Draft7Validator(_JOBSET)
    if found := [f"{error.json_path}: {error.message}" for error in schema.iter_errors(manifest)]:
        return found
    for job in manifest["spec"]["replicatedJobs"]:
        try:
            kubernetes_validate.validate(_job(job["template"]), _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(str(error))
    return found or list(_senseless(manifest))


def pods(manifest: dict[str, Any]) -> Pods:
    """Name, number and pod of each island and of the coordinator."""
    jobs = [(r["name"], r["template"]["spec"]) for r in manifest["spec"]["replicatedJobs"]]
    return [(name, job.get("completions", 1), job["template"]["spec"]) for name, job in jobs]


def host(manifest: dict[str, Any], name: str, index: int) -> str:
    """Name by which the other pods reach a pod."""
    own = manifest["metadata"]["name"]
    subdomain = manifest["spec"].get("network", {}).get("subdomain", own)
    return f"{own}-{name}-0-{index}.{subdomain}"


def _job(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}


def _pods_of_jobset(manifest: dict[str, Any]) -> Iterator[str]:
    """Errors in the numbers and names of a JobSet's pods."""
    for job in manifest["spec"]["replicatedJobs"]:
        of_job = job["template"]["spec"]
        count = of_job.get("completions", 1)
        if of_job.get("completionMode") != "Indexed" or of_job.get("parallelism") != count:
            yield f"{job['name']}: not Indexed, or its pods do not run together"
        if job.get("replicas", 1) != 1:
            yield f"{job['name']}: replicas number their pods alike"
        if job["name"] != COORDINATOR and (wrong := _misnamed(of_job["template"]["spec"])):
            yield f"{job['name']}: {wrong} is not the annotation of JobSet, by the downward API"


def _misnamed(pod: dict[str, Any]) -> str:
    """A variable of a JobSet's pod, by which jaxhet finds its island, that is wrong; else ""."""
    env = {entry["name"]: entry for entry in pod["containers"][0].get("env", [])}
    for variable, annotation in _DOWNWARD.items():
        field = env.get(variable, {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if field != f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']":
            return variable
    return ""


def _senseless(manifest: dict[str, Any]) -> Iterator[str]:
    """Errors that no schema finds."""
    yield from _pods_of_jobset(manifest)
    islands = [(name, count) for name, count, _ in pods(manifest) if name != COORDINATOR]
    coordinators = [(count, pod) for name, count, pod in pods(manifest) if name == COORDINATOR]
    if [count for count, _ in coordinators] != [1]:
        yield "not one pod for the coordinator"
        return
    command = coordinators[0][1]["containers"][0]["command"]
    port = re.search(r"--bind 0\.0\.0\.0:(\d+)", " ".join(command))
    if command[:2] != ["jaxhet", "coordinator"] or not port:
        yield "coordinator: not jaxhet coordinator --bind 0.0.0.0:PORT"
        return
    if (told := ",".join(f"{n}={count}" for n, count in islands)) != command[-1]:
        yield f"coordinator: --islands is not {told}"
    address = f"{host(manifest, COORDINATOR, 0)}:{port[1]}"
    for name, _, pod in pods(manifest):
        for problem in _of_pod(pod, None if name == COORDINATOR else address):
            yield f"{name}: {problem}"


def _of_pod(spec: dict[str, Any], address: str | None) -> Iterator[str]:
    """Errors of one pod; `address` is the coordinator's, or None in its own pod."""
    (container,) = spec["containers"]
    env = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
    if spec.get("restartPolicy") != "Never":
        yield "a pod that restarts by itself can't join the job again: restartPolicy is not Never"
    if unknown := set(mounts.values()) - volumes.keys():
        yield f"mounts volumes that there are not: {sorted(unknown)}"
        return
    secret = volumes.get(mounts.get("/run/jaxhet", ""), {}).get("secret")
    if secret is None or env.get("JAXHET_JOB_SECRET_FILE") != _SECRET_FILE:
        yield "no job secret as a file"
    elif secret.get("defaultMode", 0o644) & 0o004:
        yield "the file of the secret can be read by everybody, and jaxhet refuses it"
    if address is None:
        return
    if volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm is no memory: the runtime's 64 MiB are too few"
    if "IPC_LOCK" not in str(container.get("securityContext", {})):
        yield "no IPC_LOCK: RDMA can't pin memory"
    if not any(key.endswith("/gpu") for key in container.get("resources", {}).get("limits", {})):
        yield "no GPUs"
    if env.get("JAXHET_COORDINATOR_ADDRESS") != address:
        yield f"JAXHET_COORDINATOR_ADDRESS is not {address}"
    if container["command"][:3] != ["jaxhet", "run", "--"]:
        yield "the command is not below jaxhet run"
