"""The output of `jaxhet doctor` where real GPUs are."""

import json
import subprocess
import sys

import pytest

from jaxhet import _ffi


def test_doctor_lists_the_gpus_of_this_machine():
    found = _ffi.vendors()
    if not any(devices for _, devices, _ in found):
        pytest.skip("; ".join(f"{name}: {reason}" for name, _, reason in found))
    command = [sys.executable, "-m", "jaxhet.cli", "doctor", "--json"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    report = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["ok"] else 1), ended.stderr
    for (name, devices, _), vendor in zip(found, report["vendors"], strict=True):
        assert [gpu["uuid"] for gpu in vendor["gpus"]] == [d["uuid"] for d in devices]
        for gpu in vendor["gpus"]:
            assert gpu["id"].startswith(f"{name}:")
            assert gpu["name"]
            assert gpu["pci"] in vendor["hardware"], "sysfs has it as a GPU of this vendor"
