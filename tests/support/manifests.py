"""Errors in a Kubernetes manifest of a job, found without a cluster: fields first, then meaning.

Pods and Jobs go by the strict schemas of the package kubernetes_validate. Of JobSet's and Volcano's
own objects the fields that we use stand below, closed: any other field is a mistake.
"""

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
_EVENTS = ["*", "PodFailed", "PodEvicted", "PodPending", "TaskCompleted", "Unknown"]
_ACTIONS = ["AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "RestartPod"]
# batch.volcano.sh_jobs.yaml of Volcano 1.12, v1alpha1.
_VOLCANO = _closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=_closed("name", **_METADATA),
    spec=_closed(
        "tasks schedulerName minAvailable",
        schedulerName={"type": "string"},
        queue={"type": "string"},
        minAvailable=_COUNT,
        maxRetry=_COUNT,
        plugins={
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "string"}},
        },
        policies={
            "type": "array",
            "items": _closed(event={"enum": _EVENTS}, action={"enum": _ACTIONS}),
        },
        tasks={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                "name replicas template",
                name=_NAME,
                replicas=_COUNT,
                minAvailable=_COUNT,
                template={"type": "object"},
            ),
        },
    ),
)

Pods = list[tuple[str, int, dict[str, Any]]]  # an island's name, its number of pods, their spec


def problems(manifest: Any) -> list[str]:
    """Errors in words; empty for a manifest that a cluster should run."""
    is_jobset = isinstance(manifest, dict) and manifest.get("kind") == "JobSet"
    schema = jsonschema.Draft7Validator(_JOBSET if is_jobset else _VOLCANO)
    if found := [f"{error.json_path}: {error.message}" for error in schema.iter_errors(manifest)]:
        return found
    core = (
        [_object("batch/v1", "Job", r["template"]) for r in manifest["spec"]["replicatedJobs"]]
        if is_jobset
        else [_object("v1", "Pod", t["template"]) for t in manifest["spec"]["tasks"]]
    )
    for one in core:
        try:
            kubernetes_validate.validate(one, _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(str(error))
    return found or list(_senseless(manifest, _pods_of_jobset if is_jobset else _pods_of_volcano))


def _object(version: str, kind: str, template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, **template}


def _pods_of_jobset(manifest: dict[str, Any]) -> tuple[Pods, set[str], list[str]]:
    """Pods of each island, names by which pods are reached, and errors."""
    spec, pods, names, wrong = manifest["spec"], [], set(), []
    for job in spec["replicatedJobs"]:
        of_job = job["template"]["spec"]
        count = of_job.get("completions", 1)
        if of_job.get("completionMode") != "Indexed" or of_job.get("parallelism") != count:
            wrong.append(f"{job['name']}: not Indexed, or its pods do not run together")
        if job.get("replicas", 1) != 1:
            wrong.append(f"{job['name']}: replicas number their pods alike")
        pods.append((job["name"], count, of_job["template"]["spec"]))
        subdomain = spec.get("network", {}).get("subdomain", manifest["metadata"]["name"])
        stem = f"{manifest['metadata']['name']}-{job['name']}-0"
        names |= {f"{stem}-{i}.{subdomain}" for i in range(count)}
    return pods, names, wrong


def _pods_of_volcano(manifest: dict[str, Any]) -> tuple[Pods, set[str], list[str]]:
    spec, pods, names, wrong = manifest["spec"], [], set(), []
    own = manifest["metadata"]["name"]
    for task in spec["tasks"]:
        pods.append((task["name"], task["replicas"], task["template"]["spec"]))
        names |= {f"{own}-{task['name']}-{i}.{own}" for i in range(task["replicas"])}
    if not {"env", "svc"} <= spec.get("plugins", {}).keys():
        wrong.append("plugins env and svc number the pods and name them")
    if spec["minAvailable"] != sum(count for _, count, _ in pods):
        wrong.append("minAvailable is not all pods: some would wait for others")
    return pods, names, wrong


def _senseless(manifest: dict[str, Any], pods_of: Any) -> Iterator[str]:
    """Errors that no schema finds."""
    pods, names, wrong = pods_of(manifest)
    yield from wrong
    total, first = sum(count for _, count, _ in pods), 0
    for island, count, spec in pods:
        for problem in _of_pod(spec, island, first, total, names):
            yield f"{island}: {problem}"
        first += count


def _of_pod(
    spec: dict[str, Any], island: str, first: int, total: int, names: set[str]
) -> Iterator[str]:
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
    if secret is None or env.get("JAXHET_JOB_SECRET_FILE") != "/run/jaxhet/secret":
        yield "no job secret as a file"
    elif secret.get("defaultMode", 0o644) & 0o004:
        yield "the file of the secret can be read by everybody, and jaxhet refuses it"
    if volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm is no memory: the runtime's 64 MiB are too few"
    if "IPC_LOCK" not in str(container.get("securityContext", {})):
        yield "no IPC_LOCK: RDMA can't pin memory"
    if not any(key.endswith("/gpu") for key in container.get("resources", {}).get("limits", {})):
        yield "no GPUs"
    if env.get("JAXHET_NUM_PROCESSES") != str(total):
        yield f"JAXHET_NUM_PROCESSES is not the {total} pods"
    host, _, port = (env.get("JAXHET_COORDINATOR_ADDRESS") or "").rpartition(":")
    if host not in names or not port.isdigit():
        yield f"the coordinator's address names no pod: {host!r}"
    if container["command"][2:4] != [island, str(first)]:
        yield f"process.sh is not told {island} {first}"
