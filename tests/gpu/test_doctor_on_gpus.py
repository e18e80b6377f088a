"""The output of `jaxhet doctor` where real GPUs are."""

import json
import pathlib

import pytest

from jaxhet import _ffi
from tests.gpu.scripts_on_gpus import ON_GPUS, require_gpus
from tests.support import schemas
from tests.support.commands import launch, python


def test_doctor_lists_the_gpus_of_this_machine():
    found = _ffi.vendors()
    if not any(devices for _, devices, _ in found):
        pytest.skip("; ".join(f"{name}: {reason}" for name, _, reason in found))
    command = ("-m", "jaxhet.cli", "doctor", "--json")
    ended = python(*command, env=ON_GPUS, exit_code=None)
    report = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["ok"] else 1), ended.stderr
    for (name, devices, _), vendor in zip(found, report["vendors"], strict=True):
        assert [gpu["pci"] for gpu in vendor["gpus"]] == [d["pci"].lower() for d in devices]
        for gpu in vendor["gpus"]:
            assert gpu["id"].startswith(f"{name}:")
            assert gpu["name"]
            assert gpu["pci"] in vendor["hardware"], "sysfs has it as a GPU of this vendor"


@pytest.mark.timeout(600)
def test_channels_between_two_gpus_are_proven_by_what_the_gpus_write(tmp_path: pathlib.Path):
    require_gpus("cuda")
    report = tmp_path / "report.json"
    job = launch("--islands=2", "--devices=1")
    doctor = ("-m", "jaxhet.cli", "doctor", "--qualify", "--report", report)
    python(*job, *doctor, env=ON_GPUS, timeout_s=500)
    schemas.check("qualify", report.read_text())
    (pair,) = json.loads(report.read_text())["pairs"]
    assert pair["platforms"] == ["cuda", "cuda"]
    states = {proof["transport"]: proof["state"] for proof in pair["proofs"]}
    assert states.pop("verbs") in ("proven", "refused")
    assert states == {
        "cuda_ipc": "proven",
        "hip_ipc": "refused",
        "host": "proven",
        "socket": "proven",
    }
    assert all(proof["reason"] for proof in pair["proofs"] if proof["state"] == "refused")
