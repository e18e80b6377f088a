"""Kernel, limits and GPUs, on machines that are not here."""

import pathlib

import pytest

from jaxhet._doctor.collect import find_hardware, read_host
from jaxhet._vendors import BY_NAME
from tests.python.inspect.trees import LIMITS, Tree


def test_empty_machine_is_all_unknown(tmp_path: pathlib.Path):
    host = read_host(tmp_path)
    assert host.kernel == ""
    assert (host.memlock_bytes, host.shm_bytes) == (None, None)


@pytest.mark.parametrize(("soft", "limit"), [("8388608", 8388608), ("unlimited", None)])
def test_memlock_limit(tmp_path: pathlib.Path, soft: str, limit: int | None):
    Tree(tmp_path).file("proc/self/limits", LIMITS.format(soft=soft))
    assert read_host(tmp_path).memlock_bytes == limit


def test_hardware_is_found_by_vendor_and_class(tmp_path: pathlib.Path):
    tree = Tree(tmp_path)
    tree.pci("pci0000:00/0000:00:01.0/0000:0a:00.0", vendor=0x10DE, class_=0x030200)
    tree.pci("pci0000:00/0000:00:01.1/0000:0b:00.0", vendor=0x10DE, class_=0x068000)  # NVSwitch
    tree.pci("pci0000:00/0000:00:01.2/0000:0c:00.0", vendor=0x1002, class_=0x120000)
    assert find_hardware(tmp_path, "cuda") == ("0000:0a:00.0",)
    assert find_hardware(tmp_path, "hip") == ("0000:0c:00.0",)


@pytest.mark.parametrize(
    ("vendor", "number", "text"),
    [("cuda", 13000, "13.0"), ("cuda", 12080, "12.8"), ("hip", 70051831, "7.0.51831")],
)
def test_driver_versions(vendor: str, number: int, text: str):
    assert BY_NAME[vendor].driver_version(number) == text
