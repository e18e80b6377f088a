"""Findings of the doctor, and their words, for descriptions of machines."""

import dataclasses
import pathlib
from typing import Any

import pytest

from jaxhet._doctor import findings
from jaxhet._doctor.collect import read_host
from jaxhet._doctor.nics import read_nics
from jaxhet._doctor.report import (
    Finding,
    Gpu,
    Host,
    Part,
    Plugin,
    Software,
    Vendor,
)
from jaxhet._doctor.second_look import SecondLook
from tests.python.inspect.trees import LIMITS, Tree, chosen

THERE = Part(True, "there")
SOFTWARE = Software("3.12.1", "0.1.0", "0.11.2", "0.11.2", THERE, (), *[THERE] * 3)
PLUGIN = Plugin("jax-cuda13-plugin", "0.11.2", "cuda", "")
GPU = Gpu("cuda:0", "NVIDIA H200", "0000:18:00.0", "13.0", True, True, True)
CUDA = Vendor("cuda", ("0000:18:00.0",), "", (GPU,))
NO_DRIVER = Vendor("cuda", ("0000:18:00.0",), "dlopen: libcuda.so.1: cannot open", ())


def _host(root: pathlib.Path, **changes: Any) -> Host:
    return dataclasses.replace(read_host(root), shm_bytes=8 << 30, **changes)


def _find(root: pathlib.Path, **changes: Any) -> list[Finding]:
    parts = {
        "software": SOFTWARE,
        "vendors": (),
        "nics": read_nics(root, chosen("mlx5_0")),
        "host": _host(root),
        "second": SecondLook(THERE),
    }
    return list(findings.find(**{**parts, **changes}))


def _only(found: list[Finding], level: str) -> str:
    (finding,) = found
    assert finding.level == level
    return finding.text


def test_good_machine_has_nothing_to_say(tmp_path: pathlib.Path):
    assert _find(tmp_path) == []


def test_good_roce_host_has_nothing_to_say(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    assert _find(tmp_path, vendors=(CUDA,), software=_with(PLUGIN)) == []


def _with(*plugins: Plugin, **changes: Any) -> Software:
    return dataclasses.replace(SOFTWARE, plugins=plugins, **changes)


def test_old_jax_is_an_error(tmp_path: pathlib.Path):
    hook = Part(False, "jax 0.4 has no hook for HLO passes; install jax>=0.11.2")
    assert "no hook for HLO passes" in _only(
        _find(tmp_path, software=_with(hlo_hook=hook)), "error"
    )


def test_jax_above_those_that_were_tested_is_a_warning(tmp_path: pathlib.Path):
    assert "tested with jax up to" in _only(_find(tmp_path, software=_with(jax="1.0")), "warning")


def test_plugin_of_another_version_is_an_error_where_its_gpus_are(tmp_path: pathlib.Path):
    software = _with(dataclasses.replace(PLUGIN, problem="it is not compatible."))
    words = "it is not compatible. Install jax-cuda13-plugin==0.11.2, or uninstall it"
    assert _only(_find(tmp_path, software=software), "warning") == words
    assert _only(_find(tmp_path, software=software, vendors=(CUDA,)), "error") == words


def test_gpu_without_driver_is_an_error_where_jax_would_use_it(tmp_path: pathlib.Path):
    words = "1 GPU for cuda can't be used: dlopen: libcuda.so.1"
    assert words in _only(_find(tmp_path, vendors=(NO_DRIVER,)), "warning")
    found = _find(tmp_path, vendors=(NO_DRIVER,), software=_with(PLUGIN))
    assert words in _only(found, "error")


def test_gpu_without_plugin_says_what_to_install(tmp_path: pathlib.Path):
    found = _only(_find(tmp_path, vendors=(CUDA,)), "warning")
    assert "pip install 'jax[cuda13]'" in found


def test_small_shared_memory_of_a_container_is_said(tmp_path: pathlib.Path):
    host = dataclasses.replace(_host(tmp_path), shm_bytes=64 << 20)
    found = _find(tmp_path, vendors=(CUDA,), software=_with(PLUGIN), host=host)
    assert "/dev/shm has 64 MiB" in _only(found, "warning")
    assert "--shm-size" in found[0].text


def test_nics_without_verbs_library_are_said(tmp_path: pathlib.Path):
    Tree(tmp_path).infiniband_host()
    verbs = Part(False, "libibverbs.so.1: cannot open shared object file")
    found = _only(_find(tmp_path, software=_with(verbs=verbs)), "warning")
    assert "there are NICs, but no verbs library: libibverbs.so.1" in found


def test_memlock_limit_matters_where_nics_are(tmp_path: pathlib.Path):
    tree = Tree(tmp_path)
    tree.file("proc/self/limits", LIMITS.format(soft=8 << 20))
    assert _find(tmp_path) == []
    tree.roce_host()
    assert "at most 8 MiB may be locked" in _only(_find(tmp_path), "warning")


@pytest.mark.parametrize(
    ("link_layer", "state", "up", "advice"),
    [
        ("InfiniBand", "1: DOWN", False, "is DOWN (Disabled): check cable, switch and driver"),
        ("InfiniBand", "2: INIT", True, "is INIT (LinkUp): no subnet manager has set it up"),
        ("Ethernet", "1: DOWN", True, "bring its network device up"),
        ("Ethernet", "4: ACTIVE", True, "can't be used: no GID can be used: 0: fe80::1"),
    ],
)
def test_port_that_cannot_be_used_says_why(
    tmp_path: pathlib.Path, link_layer: str, state: str, up: bool, advice: str
):
    tree = Tree(tmp_path)
    tree.nic("mlx5_0")
    tree.port("mlx5_0", link_layer, state, up)
    problem = "no GID can be used: 0: fe80::1 RoCE v2 on ens1f0, link-local."
    nics = read_nics(tmp_path, chosen("mlx5_0", gid_index=None, reason="", problem=problem))
    found = _only(_find(tmp_path, nics=nics), "warning")
    assert found.startswith("port 1 of mlx5_0")
    assert advice in found


def test_port_that_is_left_out_is_no_finding(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    nics = read_nics(tmp_path, chosen("mlx5_0", problem="not in JAXHET_VERBS_DEVICES"))
    assert _find(tmp_path, nics=nics) == []


def test_gpu_that_no_nic_reaches_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    gpu = dataclasses.replace(GPU, dma_buf=False)
    vendor = dataclasses.replace(CUDA, gpus=(gpu,))
    found = _find(tmp_path, vendors=(vendor,), software=_with(PLUGIN))
    assert "no NIC can reach the memory of cuda:0" in _only(found, "warning")
    assert "it has no dma-buf; data goes through host memory" in found[0].text
