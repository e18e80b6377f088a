"""Network interfaces nearest to a process's GPUs, by the sysfs of machines that are not here."""

import pathlib
from typing import Any

import pytest
from trees import Tree

from jaxhet import _config, _ffi, _set_up
from jaxhet._gpu import nearby
from jaxhet._jax import platforms
from jaxhet._net import interfaces

_SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"
_OTHER_BRIDGE = "pci0000:00/0000:00:02.0"
_OTHER_NODE = "pci0000:80/0000:80:01.0"


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> Tree:
    """Two GPUs, one below a switch and one on NUMA node 1, and interfaces at all distances."""
    tree = Tree(tmp_path)
    tree.pci(f"{_SWITCH}/0000:02:00.0/0000:03:00.0")
    tree.pci(f"{_OTHER_NODE}/0000:81:00.0", numa_node=1)
    nics = {
        "switch": f"{_SWITCH}/0000:02:01.0/0000:04:00.0",
        "bridge": f"{_OTHER_BRIDGE}/0000:05:00.0",
        "node": "pci0000:40/0000:40:01.0/0000:41:00.0",
        "far": f"{_OTHER_NODE}/0000:82:00.0",
    }
    for name, path in nics.items():
        tree.pci(path, numa_node=1 if name == "far" else 0)
        tree.link(f"sys/class/net/{name}/device", f"sys/devices/{path}")
    tree.file("sys/class/net/lo/mtu", 65536)
    for name, lower in (("bond0", "bridge"), ("bond0", "switch"), ("bond0.7", "bond0")):
        tree.link(f"sys/class/net/{name}/lower_{lower}", f"sys/class/net/{lower}")
    return tree


def _words(found: dict[str, int]) -> dict[str, str]:
    return {
        name: ("?" if i == len(_ffi.DISTANCES) else _ffi.DISTANCES[i]) for name, i in found.items()
    }


def test_distances_to_a_gpu(tree: Tree) -> None:
    assert _words(nearby.distances(tree.root, ["0000:03:00.0"])) == {
        "switch": "PIX",
        "bridge": "PHB",
        "node": "NODE",
        "far": "SYS",
        "lo": "?",
        "bond0": "PIX",
        "bond0.7": "PIX",
    }


def test_nearest_of_several_gpus_counts(tree: Tree) -> None:
    found = _words(nearby.distances(tree.root, ["0000:03:00.0", "0000:81:00.0"]))
    assert (found["switch"], found["far"]) == ("PIX", "PIX")


def test_process_on_cpus_has_no_distances(tree: Tree) -> None:
    assert nearby.distances(tree.root, []) == {}
    assert nearby.interface_distances(_config.resolve({}, {}), "cpu") == {}


def test_machine_without_sysfs_has_no_distances(tmp_path: pathlib.Path) -> None:
    assert nearby.distances(tmp_path, ["0000:03:00.0"]) == {}


def test_job_takes_the_interface_nearest_to_its_gpu_first(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(ordinal: int, pci: str) -> dict[str, Any]:
        return {"ordinal": ordinal, "pci": pci}

    gpus = [device(0, "0000:81:00.0"), device(1, "0000:03:00.0")]
    monkeypatch.setattr(_ffi, "vendors", lambda: [("cuda", [], "no"), ("hip", gpus, "")])
    monkeypatch.setattr(nearby, "_ROOT", tree.root)
    found = [
        interfaces.Found(name, interfaces.ipaddress.ip_interface(f"10.0.{i}.1/24"), True, 0)
        for i, name in enumerate(("far", "bridge", "switch"))
    ]
    monkeypatch.setattr(interfaces, "here", lambda: found)

    def names(**options: object) -> list[str]:
        config = _config.resolve(options, {})
        chosen = interfaces.chosen(
            config, "10.0.1.1", lambda: nearby.interface_distances(config, "rocm")
        )
        return [interface.name for interface in chosen]

    assert names(local_device_ids=(1,)) == ["switch", "bridge", "far"]
    assert names(local_device_ids=(0,)) == ["far", "bridge", "switch"]
    assert names() == ["far", "switch", "bridge"]


def test_process_names_the_models_of_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"ordinal": i, "model": model} for i, model in enumerate(("MI300X", "MI250X"))]
    monkeypatch.setattr(_ffi, "vendors", lambda: [("cuda", [], "no"), ("hip", gpus, "")])
    monkeypatch.setattr(platforms, "expected_platform", lambda: "rocm")

    def models(**options: object) -> tuple[str, ...]:
        return _set_up.make_process_info(_config.resolve(options, {}), "").gpus

    assert models(local_device_ids=(1,)) == ("MI250X",)
    assert models() == ("MI300X", "MI250X")
