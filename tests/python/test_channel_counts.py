"""Device channels from the start, and the table of numbers in docs/explanation/devices.md.

`python -m tests.python.test_channel_counts` prints the table.
"""

import re
import types
from typing import Any

import pytest

from jaxhet import _config, _islands
from jaxhet._device_channels import ChannelPlan, plan_channels, rails
from jaxhet._job import connector
from tests.support.jobs import ROOT

_PAGE = ROOT / "docs" / "explanation" / "devices.md"
_GPUS_OF_HOST = 8
_SIZES = (8, 16, 64, 256, 1024)
_TRANSPORTS = "xla_plugin/transport/device_channel"
_SOURCES = (
    f"{_TRANSPORTS}/device_channel.h",
    f"{_TRANSPORTS}/device_channel.cc",
    f"{_TRANSPORTS}/lane_channel.cc",
    f"{_TRANSPORTS}/lane.h",
)
_MESSAGES_OF_PAIR = 5  # sent by a rank: ChannelStep has them


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


def _fair_slot(wanted: int, budget: int, num_channels: int) -> int:
    """FairSlotBytes of the engine."""
    unit = _constant("kLeastSlotBytes")
    return min(wanted, max(budget // (_constant("kChannelSlots") * num_channels) // unit, 1) * unit)


def _members(islands: str, gpus_of_host: int) -> list[Any]:
    """A process with GPUs for each letter, on the island of this name."""
    return [
        types.SimpleNamespace(
            process=i, island=name, platform="cuda", host=str(i), host_id=str(i // gpus_of_host)
        )
        for i, name in enumerate(islands)
    ]


def _plan(members: list[Any], process: int, **options: Any) -> ChannelPlan:
    """The channels of a process of a job with one GPU in each process."""
    devices: Any = [types.SimpleNamespace(id=m.process, process_index=m.process) for m in members]
    config = _config.resolve(options, environ={}).placed(process, len(members))
    connected = set(range(len(members))) - {process}
    if not connector.connects_all(config.connect, members):
        connected = connector.partners(process, members)
    return plan_channels(config, _islands.make_islands(members, devices), members, connected)


def _threads(sockets: list[int]) -> int:
    """Proxy threads of a rank, by its number of sockets to each partner."""
    most = min(_constant("kThreadsOfLane") * max(sockets, default=0), _constant("kMostThreads"))
    return min(sum(sockets), most)


def _row(num_gpus: int) -> list[int]:
    """Numbers of the first rank of two islands."""
    members = _members("a" * (num_gpus // 2) + "b" * (num_gpus // 2), _GPUS_OF_HOST)
    plan = _plan(members, 0)
    config = _config.resolve({}, environ={})
    is_small = connector.connects_all(config.connect, members)
    control = num_gpus - 1 if is_small else len(connector.partners(0, members))
    early = num_gpus - 1 - len(plan.later)
    of_pairs = [plan.sockets[pair] for pair in plan.sockets if pair not in plan.later]
    sockets, threads = sum(of_pairs), _threads(of_pairs)
    slots, budget = _constant("kChannelSlots"), _constant("kMostDeviceBytes")
    slot = _fair_slot(config.slot_bytes, budget // 2 if plan.later else budget, early)
    most = min(config.slot_bytes, _constant("kMostHostSlotBytes"))
    piece = _constant("kWordsBytes") + slots * _fair_slot(most, budget // 2, num_gpus - 1)
    return [
        2 * early,
        control,
        sockets,
        threads,
        control + sockets + threads + min(threads, 1),
        early * slots * slot >> 20,
        2 * len(plan.later) * piece >> 20,
        _MESSAGES_OF_PAIR * early,
    ]


@pytest.mark.parametrize("num_gpus", _SIZES)
def test_numbers_of_device_channels(num_gpus: int) -> None:
    assert _table()[num_gpus] == _row(num_gpus)


def test_all_rows_are_checked() -> None:
    assert list(_table()) == list(_SIZES)


def test_rails_join_the_same_place_of_any_two_islands() -> None:
    assert rails([(0, 1), (2, 3)]) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert rails([(0, 1, 2), (3,)]) == {(i, 3) for i in range(3)} | {(3, i) for i in range(3)}
    assert {pair for pair in rails([(0, 1), (2, 3), (4, 5)]) if pair[0] == 0} == {(0, 2), (0, 4)}


@pytest.mark.parametrize("islands", ["ab", "aabb", "aaab", "abcabc", "ab" * 10 + "b"])
@pytest.mark.parametrize("gpus_of_host", [1, 2, 4])
@pytest.mark.parametrize("transports", [("host", "socket"), ("socket",), ("host",)])
def test_both_ends_of_a_pair_open_it_at_the_same_time(
    islands: str, gpus_of_host: int, transports: tuple[str, ...]
) -> None:
    members = _members(islands, gpus_of_host)
    plans = [_plan(members, i, transports=transports) for i in range(len(members))]
    later = {pair for plan in plans for pair in plan.later}
    assert {(b, a) for a, b in later} == later
    for plan in plans:
        for (own, other), number in plan.sockets.items():
            assert plans[other].sockets[other, own] == number
            theirs = [(b, a) for a, b in plans[other].later_with(own)]
            assert plan.later_with(other) == theirs
    if transports == ("host",):  # which can't leave a host: an error at the start
        assert not later


@pytest.mark.parametrize(
    ("num_islands", "sockets", "threads"),
    [(2, 8, 8), (3, 8, 8), (4, 6, 4), (5, 8, 4), (8, 7, 2), (16, 15, 2)],
)
def test_partners_share_the_sockets_of_a_rank(num_islands: int, sockets: int, threads: int) -> None:
    names = "".join(2 * chr(ord("a") + i) for i in range(num_islands))
    plan = _plan(_members(names, 2), 0, connect="needed")
    of_pairs = [plan.sockets[pair] for pair in _rails_of(names, 0)]
    assert (sum(of_pairs), _threads(of_pairs)) == (sockets, threads)
    off_rail = [number for pair, number in plan.sockets.items() if pair not in _rails_of(names, 0)]
    assert sum(off_rail) <= max(8, len(off_rail))


def _rails_of(names: str, rank: int) -> set[tuple[int, int]]:
    islands: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        islands.setdefault(name, []).append(i)
    return {pair for pair in rails(islands.values()) if pair[0] == rank}


def test_option_connect_all_leaves_nothing_for_later() -> None:
    members = _members("aabb", 1)
    assert _plan(members, 0).later == {(0, 1), (0, 3)}
    assert not _plan(members, 0, connect="all").later


if __name__ == "__main__":
    for size in _SIZES:
        print("|", " | ".join(map(str, [size, *_row(size)])), "|")
