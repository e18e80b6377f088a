"""Tables that C++ and Python both need say the same."""

import pathlib
import subprocess
import sys

import pytest

from jaxhet import _config, _ffi, _options, _vendors
from jaxhet.compiler import ExchangeKind


def test_exchange_kinds_have_the_engines_numbers() -> None:
    for kind in ExchangeKind:
        assert _ffi.EXCHANGE_KINDS[kind.name.lower()] == kind.value


def test_transports_are_the_engines_best_first() -> None:
    for table in (_ffi.TRANSPORTS, _ffi.DEVICE_TRANSPORTS):
        allowed = [t for t in table if t != "local"]  # within a process, without a choice
        assert allowed == [t for t in _options.TRANSPORTS if t in table]
    assert {*_ffi.TRANSPORTS, *_ffi.DEVICE_TRANSPORTS} == {*_options.TRANSPORTS, "local"}


def test_engine_needs_exactly_the_options_that_the_table_marks() -> None:
    values = _config.resolve({}, {}).engine_values()

    def make(values: dict[str, int | str]) -> None:
        _ffi._engine.Engine(1, 0, 1, values)

    make(values)
    with pytest.raises(RuntimeError, match="no engine option is called 'x'"):
        make({**values, "x": 1})
    for name in values:
        with pytest.raises(RuntimeError, match=f"the engine option '{name}' must be a"):
            make({n: value for n, value in values.items() if n != name})


def test_vendors_are_the_engines() -> None:
    assert [name for name, _, _ in _ffi.vendors()] == [vendor.name for vendor in _vendors.VENDORS]


# The vendor of CONTRIBUTING: the C++ test DevicesOfTwoVendorsSwap has its devices.
NEW_VENDOR = """
import pathlib, sys
from jaxhet import _vendors
row = _vendors.Vendor("other", "other_driver", "OTHER_DEVICES", "OTHER_QUEUES", 24, 0x1234, "jax-o")
_vendors.BY_PLATFORM["other"] = _vendors.BY_NAME["other_driver"] = row

from jaxhet import _config, _errors, _ffi
from jaxhet._doctor import collect, software
from jaxhet._gpu import gpu_settings
from jaxhet._jax import jaxlib
from jaxhet._launch.gpus import visible

assert jaxlib.GPU_PLATFORMS == ("cuda", "rocm", "other")
shown = visible("other", {"OTHER_DEVICES": "4,5"}, 8).environment(["5"])
assert shown == {"OTHER_DEVICES": "5,4", "JAXHET_LOCAL_DEVICE_IDS": "0"}, shown
environ = {}
gpu_settings.give_queues_to_streams("other", environ)
assert environ == {"OTHER_QUEUES": "24"}
(plugin,) = software.find_plugins([("jax_other2_pjrt", "1.0")])
assert plugin.vendor == "other_driver"
device = pathlib.Path(sys.argv[1], "sys/bus/pci/devices/0000:01:00.0")
device.mkdir(parents=True)
(device / "vendor").write_text("0x1234")
(device / "class").write_text("0x120000")
assert collect.find_hardware(pathlib.Path(sys.argv[1]), "other_driver") == (device.name,)
try:
    engine = _ffi.Engine(_config.PlacedConfig(), members=[None], refused={})
    engine.open_devices("other", [], [], 1, [])
except _errors.UsageError as error:
    assert str(error) == "no vendor is called 'other_driver'; there are cuda, hip", error
else:
    raise AssertionError("the engine has not been asked for the vendor")
"""


def test_new_vendor_is_one_row_of_python(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", NEW_VENDOR, str(tmp_path)], check=True)
