"""Numbers of device channels, slots, sockets and threads in docs/explanation/devices.md."""

import re
import types
from collections.abc import Mapping
from typing import Any

import pytest

from jaxhet import _config, _ffi, _islands, _set_up
from jaxhet._jax import compat
from jaxhet._job import bootstrap
from tests.support.jobs import ROOT

_PAGE = ROOT / "docs" / "explanation" / "devices.md"
_GPUS_OF_HOST = 8
_SOURCES = (
    "xla_plugin/transport/device_channel/device_channel.h",
    "xla_plugin/transport/device_channel/proxy.h",
    "xla_plugin/engine/device/channel_setup.cc",
)


def _table() -> dict[int, list[int]]:
    """The table's rows by number of GPUs."""
    lines = _PAGE.read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.fullmatch(r"(\| \d+ )+\|", line)]
    return {int(row[0]): [int(cell) for cell in row[1:]] for row in rows}


def _constant(name: str) -> int:
    """A constant of the engine, in bytes or pieces."""
    text = "".join((ROOT / source).read_text() for source in _SOURCES)
    found = re.search(rf"{name} = (?:size_t\{{)?(\d+)\}}?(?: << (\d+))?;", text)
    assert found, name
    return int(found[1]) << int(found[2] or 0)


def _slots_mib(num_gpus: int, slot_bytes: int) -> float:
    """Size of the slots that one rank reads; `ChannelNegotiation` has the formula."""
    slots, unit = _constant("kChannelSlots"), _constant("kLeastSlotBytes")
    fair = _constant("kMostDeviceBytes") // (slots * (num_gpus - 1)) // unit
    return min(slot_bytes, max(fair, 1) * unit) * slots * (num_gpus - 1) / 2**20


def _session(num_gpus: int, config: _config.Config) -> Any:
    """A session of process 0 of a job with one GPU in each process; two islands."""
    ranks = range(num_gpus)
    devices: Any = [
        types.SimpleNamespace(id=i, process_index=i, local_hardware_id=0, platform="cuda")
        for i in ranks
    ]
    half = num_gpus // 2
    members = [_islands.Member(i, "ab"[i >= half], "cuda", str(i // _GPUS_OF_HOST)) for i in ranks]
    islands = _islands.make_islands(members, devices)
    return types.SimpleNamespace(process=0, config=config, islands=islands, island=islands[0])


@pytest.mark.parametrize("num_gpus", [8, 64, 1024])
def test_numbers_of_device_channels(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}

    def connect(
        _listener: Any, pairs: Mapping[Any, Any], _ranks: int, each: tuple[int, int], *_: Any
    ) -> list[Any]:
        opened.update(pairs=len(pairs), each=each)
        opened.update(sockets=sum(data for _, data in pairs.values()))
        return []

    monkeypatch.setattr(bootstrap, "connect_device_channels", connect)
    memory = types.SimpleNamespace(nbytes=64, unsafe_buffer_pointer=lambda: 0)
    monkeypatch.setattr(compat, "memory_on", lambda *_: memory)
    config = _config.resolve({}, environ={})
    members: Any = [
        types.SimpleNamespace(process=i, host_id=str(i // _GPUS_OF_HOST)) for i in range(num_gpus)
    ]
    engine: Any = types.SimpleNamespace(open_devices=lambda *_: None)
    none: Any = None
    _set_up._open_devices(_session(num_gpus, config), engine, members, none, lambda: None)

    assert opened["each"] == (_ffi.CHANNEL_MESSAGE_SOCKETS, config.device_channel_sockets)
    others = num_gpus - 1
    assert _table()[num_gpus] == [
        num_gpus * others,
        2 * others,
        _slots_mib(num_gpus, config.slot_bytes),
        opened["sockets"],
        min(opened["pairs"], 1) * _constant("kMostThreads"),
    ]


def test_all_rows_are_checked() -> None:
    assert list(_table()) == [8, 64, 1024]
