"""The trace of a job of two islands: matching exchanges overlap on the one clock."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from two_islands import run_both

from jaxhet.cli import trace as cli
from tests.support import trace_events

_LATE_US = 300_000
_SCRIPT = f"""
f = over_islands(psum)
f(x).block_until_ready()
if me == 1:
    time.sleep({_LATE_US} / 1e6)
f(x).block_until_ready()
jaxhet.shutdown()
"""
_ONE_DIES = """
f = over_islands(psum)
f(x).block_until_ready()
if me == 1:
    os._exit(3)
try:
    f(x).block_until_ready()
except jaxhet.JaxhetError:
    pass
"""

Event = dict[str, Any]


def _read(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("jaxhet-*.trace.json"))]


def _matching(trace: dict[str, Any]) -> list[list[Event]]:
    """The events of each exchange, one of each of its processes, in the order of the first's."""
    found: dict[tuple[int, ...], list[Event]] = {}
    for event in sorted(trace_events.complete(trace), key=lambda event: event["pid"]):
        same = tuple(event["args"][name] for name in ("plan", "index", "run", "sequence"))
        found.setdefault(same, []).append(event)
    return list(found.values())


def _overlap(events: Sequence[Event], error_us: float) -> bool:
    latest_start = max(event["ts"] for event in events)
    earliest_end = min(event["ts"] + event["dur"] for event in events)
    return latest_start <= earliest_end + error_us


@pytest.mark.slow
def test_matching_exchanges_of_two_islands_overlap_on_the_one_clock(tmp_path: pathlib.Path) -> None:
    for ended in run_both(_SCRIPT, JAXHET_TRACE_FOLDER=str(tmp_path)):
        assert ended.code == 0, ended.text
    processes = _read(tmp_path)
    assert [process["otherData"]["process"] for process in processes] == [0, 1]
    output = tmp_path / "trace.json"
    cli.trace(tmp_path, output)
    merged = json.loads(output.read_text())
    trace_events.check(merged)

    error_us = sum(process["otherData"]["clock_error_us"] for process in processes)
    pairs = _matching(merged)
    assert len(pairs) == 2
    for pair in pairs:
        assert [event["pid"] for event in pair] == [0, 1]
        assert _overlap(pair, error_us)
        for event, peer in zip(pair, (1, 0), strict=True):
            assert event["args"]["bytes"] == 24
            assert event["args"]["peers"] == [peer]
            assert event["args"]["transport"] == "process_vm"
            assert event["args"]["state"] == "completed"
    early, late = pairs[1]
    assert late["ts"] - early["ts"] >= 0.9 * _LATE_US - error_us
    assert early["dur"] >= 0.9 * _LATE_US - error_us

    for event in trace_events.complete(processes[1]):
        event["ts"] += 1e7
    wrong = cli.merge(tmp_path, processes)
    assert not any(_overlap(pair, error_us) for pair in _matching(wrong))


@pytest.mark.slow
def test_a_process_whose_peer_died_writes_what_failed(tmp_path: pathlib.Path) -> None:
    run_both(_ONE_DIES, JAXHET_TRACE_FOLDER=str(tmp_path))
    (survivor,) = _read(tmp_path)
    trace_events.check(survivor)
    events = trace_events.complete(survivor)
    assert [event["args"]["state"] for event in events] == ["completed", "failed"]
    assert {event["pid"] for event in events} == {0}
