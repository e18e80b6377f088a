"""Traces of several processes on one clock; tests/multiprocess/test_trace_islands.py has jobs."""

import collections
import json
import pathlib
import types
from typing import Any

import pytest

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import clock as _clock
from jaxhet._job.clock import CoordinatorClock, Reading
from jaxhet._telemetry import trace as _trace
from jaxhet._telemetry.trace import Trace
from jaxhet.cli import trace as cli
from tests.support import trace_events


def _exchange(start: float, end: float, **fields: Any) -> dict[str, Any]:
    return {
        "rank": 0,
        "kind": "all_gather",
        "plan": 7,
        "index": 0,
        "run": 1,
        "sequence": 0,
        "bytes": 24,
        "group": [0, 1],
        "state": "completed",
        "started_us": start,
        "ended_us": end,
        "exchange": "exchange 0 (psum)",
        **fields,
    }


_TRANSPORTS = {0: {"process_vm"}, 1: {"verbs", "socket"}, 2: {"verbs", "socket"}}


def _file(process: int, *exchanges: dict[str, Any], readings: Any = None) -> dict[str, Any]:
    """The content of the file of a process."""
    readings = [Reading(0.0, 0.0, 2.0)] if readings is None else readings
    found = _trace.events(
        exchanges,
        _TRANSPORTS,
        process=process,
        title=f"process {process}",
        on_job_clock=lambda local_us: _trace.on_job_clock(readings, local_us),
    )
    error_us = max((reading.error_us for reading in readings), default=None)
    facts = {"job": "ab" * 16, "process": process, "clock_error_us": error_us}
    return {"traceEvents": [*found], "otherData": facts}


def _merge(*files: dict[str, Any]) -> dict[str, Any]:
    merged = cli.merge(pathlib.Path("traces"), [*files])
    trace_events.check(merged)
    return merged


def _events(*files: dict[str, Any]) -> list[dict[str, Any]]:
    return trace_events.complete(_merge(*files))


def test_times_are_on_one_clock_from_the_first_start() -> None:
    first = _file(0, _exchange(5_000, 5_400), readings=[Reading(0.0, 100_000, 2.0)])
    second = _file(1, _exchange(90_100, 90_500, rank=1), readings=[Reading(0.0, 15_000, 2.0)])
    assert [(e["ts"], e["dur"]) for e in _events(first, second)] == [(0, 400), (100, 400)]


def test_a_clock_that_drifts_is_followed_between_two_readings() -> None:
    readings = [Reading(1_000, 10, 2), Reading(2_000, 12, 7), Reading(3_000, 30, 5)]
    file = _file(0, _exchange(1_000, 1_500), _exchange(3_000, 3_500), readings=readings)
    assert [event["ts"] for event in _events(file)] == [0, 2_020]


def test_an_exchange_says_what_it_moved_and_with_whom() -> None:
    (event,) = _events(_file(0, _exchange(10, 20)))
    assert event["name"] == "all_gather"
    assert event["args"] == {
        "peers": [1],
        "transport": "socket+verbs",
        "bytes": 24,
        "state": "completed",
        "plan": "7",
        "index": 0,
        "run": 1,
        "sequence": 0,
        "exchange": "exchange 0 (psum)",
    }
    (alone,) = _events(_file(0, _exchange(10, 20, group=[0])))
    assert (alone["args"]["peers"], alone["args"]["transport"]) == ([], "local")


def test_every_row_is_a_thread_of_its_own_that_no_viewer_takes_for_a_main_thread() -> None:
    ranks = [_exchange(0, 10, rank=rank) for rank in range(3)]
    merged = _merge(_file(0, ranks[0]), _file(1, *ranks[1:]))
    threads = [e["tid"] for e in merged["traceEvents"] if e["name"] == "thread_name"]
    assert len(set(threads)) == 3
    assert not {0, 1} & set(threads)


def test_what_is_not_over_lasts_until_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "now_us", lambda: 9_000.0)
    (event,) = _events(_file(0, _exchange(4_000, 0, state="started")))
    assert (event["dur"], event["args"]["state"]) == (5_000, "started")


def test_exchanges_at_the_same_time_have_rows_of_their_own() -> None:
    times = [(0, 10), (5, 20), (6, 8), (10, 12), (12, 30), (20, 25), (3, 4)]
    exchanges = [_exchange(*time) for time in times]
    others = [_exchange(0, 50, rank=1, group=[0, 1]), _exchange(0, 50, group=[0])]
    merged = _merge(_file(0, *exchanges, *others))
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "thread_name"]
    shared = ["rank 0, socket+verbs", "rank 0, socket+verbs (2)", "rank 0, socket+verbs (3)"]
    assert names == ["rank 0, local", *shared, "rank 1, process_vm"]
    found = collections.Counter(
        (e["ts"], e["ts"] + e["dur"]) for e in trace_events.complete(merged)
    )
    assert found == collections.Counter([*times, (0, 50), (0, 50)])


# The command.


def test_files_of_a_folder_become_one_trace(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (_file(0, _exchange(0, 10)), _file(1, _exchange(1, 2, rank=1), readings=[]))
    for i, file in enumerate(files):
        (tmp_path / f"jaxhet-{i}.trace.json").write_text(json.dumps(file))
    output = tmp_path / "trace.json"
    cli.trace(tmp_path, output)
    merged = json.loads(output.read_text())
    trace_events.check(merged)
    assert {event["pid"] for event in trace_events.complete(merged)} == {0, 1}
    text = capsys.readouterr().out
    assert "process 0: 1 exchanges; clock known within 2 us" in text
    assert "process 1: 1 exchanges; it never read the coordinator's clock" in text
    assert "open it at https://ui.perfetto.dev" in text


def test_folders_and_files_that_hold_no_trace(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "trace.json"
    with pytest.raises(UsageError, match="start the job with JAXHET_TRACE_FOLDER="):
        cli.trace(tmp_path, output)
    path = tmp_path / "jaxhet-0.trace.json"
    for text in ("{", "[]", '{"traceEvents": [], "otherData": {}}', '{"traceEvents": [1]}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"jaxhet-0.trace.json is no trace of a process \("):
            cli.trace(tmp_path, output)
    path.write_text(json.dumps(_file(0)))
    strange = tmp_path / "jaxhet-1.trace.json"
    strange.write_text(json.dumps(_file(1)).replace("abab", "cdcd"))
    told = r"files of several jobs: process 0 was in job (ab)+, process 1 in job (cd)+; remove"
    with pytest.raises(UsageError, match=told):
        cli.trace(tmp_path, output)
    strange.unlink()
    with pytest.raises(UsageError, match=r"can't write the trace to .*; choose another file \(-o"):
        cli.trace(tmp_path, tmp_path / "no" / "trace.json")
    cli.trace(tmp_path, output)  # a process that exchanged nothing


# --- records of a process ---


class _Engine:
    def __init__(self) -> None:
        self.records = [_exchange(1, 2)]

    def flight_record(self) -> list[dict[str, Any]]:
        return self.records

    def peer_stats(self) -> list[dict[str, Any]]:
        return [
            {"process": 0, "transport": "local", "bytes_sent": 0, "bytes_received": 0},
            {"process": 1, "transport": "socket", "bytes_sent": 0, "bytes_received": 8},
            {"process": 1, "transport": "process_vm", "bytes_sent": 8, "bytes_received": 0},
        ]


def _session(engine: _Engine) -> Any:
    devices = [types.SimpleNamespace(process_index=process) for process in (0, 1)]
    island = types.SimpleNamespace(name="a", ranks=(0, 1), devices=devices)
    return types.SimpleNamespace(
        process=0, island=island, islands=(island,), engine=engine, error=lambda: None
    )


def _followed(folder: pathlib.Path, engine: _Engine) -> Trace:
    clock = CoordinatorClock(lambda number: clock.hear(number, _clock.now_us() + 5e6))
    membership: Any = types.SimpleNamespace(clock=clock, job=bytes(16))
    return Trace(folder, _session(engine), membership)


def test_a_process_writes_its_trace_until_it_leaves(tmp_path: pathlib.Path) -> None:
    engine, path = _Engine(), tmp_path / "jaxhet-0.trace.json"
    trace = _followed(tmp_path, engine)
    started_us = _clock.now_us()
    engine.records = [_exchange(started_us, started_us)]
    trace.write()
    first = json.loads(path.read_text())
    trace_events.check(first)  # a viewer shows it without `jaxhet trace`
    (event,) = trace_events.complete(first)
    assert event["args"]["transport"] == "process_vm+socket"
    assert abs(event["ts"] - started_us - 5e6) <= first["otherData"]["clock_error_us"] + 1
    engine.records.append(_exchange(3, 4))
    trace.close()
    assert len(trace_events.complete(json.loads(path.read_text()))) == 2
    path.unlink()
    trace.write()  # the engine is gone by then
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_can_not_be_written_says_so_and_ends_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    with pytest.raises(UsageError, match="traces is no folder; make it, or name another one"):
        _trace.folder(_config.resolve({"trace_folder": str(folder)}, {}))
    folder.mkdir()
    trace = _followed(folder, _Engine())
    folder.rmdir()
    trace.close()
    text = capsys.readouterr().err
    assert "jaxhet: process 0 can't write its trace to" in text
    assert (
        "No such file or directory; make room there or choose another JAXHET_TRACE_FOLDER" in text
    )


# The clock.


def test_the_shortest_round_trip_bounds_the_error_whatever_each_way_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(_clock, "now_us", lambda: now[0])
    ways = iter([(50.0, 900.0), (3.0, 11.0), (400.0, 10.0)] + [(500.0, 500.0)] * 13)

    def ask(number: int) -> None:
        there, back = next(ways)
        now[0] += there
        coordinator = now[0] + 1_000_000
        now[0] += back
        clock.hear(number, coordinator)

    clock = CoordinatorClock(ask)
    reading = clock.read()
    assert reading is not None
    assert reading.error_us == 7
    assert reading.offset_us == 1_000_000 - 4


def test_a_coordinator_whose_answer_is_no_time_is_refused() -> None:
    clock = CoordinatorClock(lambda number: None)
    wrong: tuple[Any, ...] = ("5", None, float("nan"), float("inf"))
    for answer in wrong:
        with pytest.raises(ValueError, match="is no time"):
            clock.hear(0, answer)


def test_a_coordinator_that_is_late_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_clock, "_ANSWER_TIMEOUT_S", 0.01)
    asked: list[int] = []
    clock = CoordinatorClock(asked.append)
    assert clock.read() is None
    clock.hear(asked[0], 0.0)  # the answer to a question that was given up
    assert clock.read() is None
    assert asked == [1, 2]
