"""`jaxhet doctor` on this machine: its questions to programs, sockets and engines."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

from jaxhet import _ffi
from jaxhet._doctor import report, second_look, software
from jaxhet._doctor.collect import read_vendors
from jaxhet._errors import UsageError
from jaxhet._job import proofs
from tests.support import schemas
from tests.support.commands import python
from tests.support.jobs import ROOT


def _classes() -> dict[str, Any]:
    found = {**vars(report), **vars(proofs)}
    return {name: c for name, c in found.items() if dataclasses.is_dataclass(c)}


@pytest.mark.parametrize("name", sorted(_classes()))
def test_every_field_is_described(name: str):
    cls = _classes()[name]
    described = re.findall(r"^\s+(\w+): ", cls.__doc__ or "", re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(cls)]


def _doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "jaxhet.cli", "doctor", *arguments, exit_code=None, env=env)


def test_json_is_the_report():
    ended = _doctor("--json")
    schemas.check("doctor", ended.stdout)
    found = json.loads(ended.stdout)
    assert list(found) == [field.name for field in dataclasses.fields(report.Report)]
    assert ended.returncode == (0 if found["ok"] else 1), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ([], {"JAXHET_TRANSPORTS": "pigeon"}, "transports takes cuda_ipc, hip_ipc, host"),
        (["--report", "x.json"], {}, "--report is of use with --qualify only"),
        (
            ["--qualify", "--report", "/nope/x.json"],
            {},
            "can't write /nope/x.json: no folder /nope",
        ),
        (["--qualify"], {}, "no coordinator_address"),
        (
            ["--qualify"],
            {"JAXHET_NUM_PROCESSES": "1"},
            "a job of one process has nothing to prove",
        ),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], env: dict[str, str], words: str):
    ended = _doctor(*arguments, **env)
    assert ended.returncode == 2
    assert words in ended.stderr


def test_plugins_are_found_and_compared_with_jaxlib():
    jaxlib = software.read_software(second_look.look().part).jaxlib
    found = software.find_plugins(
        [
            ("jax_cuda13_plugin", jaxlib),
            ("jax-cuda12-plugin", "0.1.0"),
            ("jax-cuda13-pjrt", "0.1.0"),  # JAX leaves this one's version to its plugin
            ("jax-rocm7-plugin", "0.12.0"),
            ("jax", jaxlib),
        ]
    )
    assert [(p.name, p.vendor) for p in found] == [
        ("jax-cuda12-plugin", "cuda"),
        ("jax-cuda13-pjrt", "cuda"),
        ("jax-cuda13-plugin", "cuda"),
        ("jax-rocm7-plugin", "hip"),
    ]
    assert not any(plugin.problem for plugin in found[1:])
    assert "not compatible with the installed jaxlib version" in found[0].problem


def test_no_verbs_library_is_one_line():
    part = software.load_library("libno-such-verbs.so.1")
    assert not part.usable
    assert part.text.startswith("libno-such-verbs.so.1: cannot open shared object file")
    assert "\n" not in part.text


def test_vendors_are_the_device_layers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    gpu = {
        "ordinal": 1,
        "name": "AMD Instinct MI350X",
        "pci": "0000:0C:00.0",
        "driver_version": 70051831,
        "stream_values": True,
        "dma_buf": False,
        "gpu_direct_rdma": True,
    }
    monkeypatch.setattr(_ffi, "vendors", lambda: [("cuda", [], "no libcuda"), ("hip", [gpu], "")])
    cuda, hip = read_vendors(tmp_path)
    assert (cuda.reason, cuda.gpus) == ("no libcuda", ())
    (found,) = hip.gpus
    assert (found.id, found.pci, found.driver) == ("hip:1", "0000:0c:00.0", "7.0.51831")
    assert (found.stream_values, found.dma_buf, found.gpu_direct_rdma) == (True, False, True)


def test_gpus_of_both_vendors_are_listed(tmp_path: pathlib.Path):
    """With the drivers of the C++ tests, which have two devices each."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for the fake drivers")
    libraries = [tmp_path / name for name in ("libcuda.so.1", "libamdhip64.so.7")]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{ROOT}"]
    source = str(ROOT / "tests/cpp/fake_driver.cc")
    subprocess.run([*command, source, "-o", str(libraries[0])], check=True)
    libraries[1].symlink_to(libraries[0])
    ended = _doctor("--json", LD_LIBRARY_PATH=str(tmp_path))
    vendors = json.loads(ended.stdout)["vendors"]
    assert [(v["name"], v["reason"]) for v in vendors] == [("cuda", ""), ("hip", "")]
    assert [gpu["id"] for v in vendors for gpu in v["gpus"]] == [
        *("cuda:0", "cuda:1"),
        *("hip:0", "hip:1"),
    ]
    first = vendors[0]["gpus"][0]
    assert (first["name"], first["pci"], first["driver"]) == ("Fake GPU", "0000:01:00.0", "7.0")
    assert (first["stream_values"], first["dma_buf"], first["gpu_direct_rdma"]) == (True,) * 3


def test_every_vendor_has_devices_or_a_reason():
    found = {name: (devices, reason) for name, devices, reason in _ffi.vendors()}
    assert list(found) == ["cuda", "hip"]
    for devices, reason in found.values():
        assert not (devices and reason)
        assert reason.startswith(("dlopen: ", "cu", "hip")) or not reason


def test_library_of_encryption_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.read_software(report.Part(True, "")).libcrypto.text.startswith("OpenSSL ")

    def missing() -> str:
        raise UsageError("JAXHET_ENCRYPTION=full needs OpenSSL's libcrypto on every host: none")

    monkeypatch.setattr(_ffi, "libcrypto", missing)
    part = software.read_software(report.Part(True, "")).libcrypto
    assert not part.usable
    assert "needs OpenSSL's libcrypto on every host" in part.text
