"""Traces of several processes on one clock; tests/multiprocess/test_trace_islands.py has jobs."""

import collections
import dataclasses
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
from jaxhet._telemetry.trace import ProcessTrace, Trace
from jaxhet.cli import trace as cli
from tests.support import schemas, trace_events


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


def _process(process: int, *exchanges: dict[str, Any], offset_us: float = 0.0) -> ProcessTrace:
    return ProcessTrace(
        job="ab" * 16,
        process=process,
        island=f"island{process}",
        host="a host",
        pid=100 + process,
        written_us=9_000.0,
        processes=[0, 1, 1],
        transports={0: ["process_vm"], 1: ["socket", "verbs"]},
        readings=[Reading(0.0, offset_us, 2.0)],
        exchanges=list(exchanges),
    )


def _events(*processes: ProcessTrace) -> list[dict[str, Any]]:
    merged = cli.merge(processes)
    trace_events.check(merged)
    return trace_events.complete(merged)


def test_times_are_on_one_clock_from_the_first_start() -> None:
    first = _process(0, _exchange(5_000, 5_400), offset_us=100_000)
    second = _process(1, _exchange(90_100, 90_500, rank=1), offset_us=15_000)
    assert [(e["ts"], e["dur"]) for e in _events(first, second)] == [(0, 400), (100, 400)]


def test_a_clock_that_drifts_is_followed_between_two_readings() -> None:
    process = dataclasses.replace(
        _process(0, _exchange(1_000, 1_500), _exchange(3_000, 3_500)),
        readings=[Reading(1_000, 10, 2), Reading(2_000, 12, 7), Reading(3_000, 30, 5)],
    )
    starts = [event["ts"] for event in _events(process)]
    assert starts == [0, 2_020]
    assert cli.error_us(process) == 7


def test_an_exchange_says_what_it_moved_and_with_whom() -> None:
    (event,) = _events(_process(0, _exchange(10, 20)))
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
    (alone,) = _events(_process(0, _exchange(10, 20, group=[0])))
    assert (alone["args"]["peers"], alone["args"]["transport"]) == ([], "local")


def test_every_row_is_a_thread_of_its_own_that_no_viewer_takes_for_a_main_thread() -> None:
    ranks = [_exchange(0, 10, rank=rank) for rank in range(3)]
    merged = cli.merge([_process(0, ranks[0]), _process(1, *ranks[1:])])
    trace_events.check(merged)
    threads = [e["tid"] for e in merged["traceEvents"] if e["name"] == "thread_name"]
    assert len(set(threads)) == 3
    assert not {0, 1} & set(threads)


def test_what_is_not_over_lasts_until_the_report() -> None:
    (event,) = _events(_process(0, _exchange(4_000, 0, state="started")))
    assert (event["dur"], event["args"]["state"]) == (5_000, "started")


def test_exchanges_at_the_same_time_have_rows_of_their_own() -> None:
    times = [(0, 10), (5, 20), (6, 8), (10, 12), (12, 30), (20, 25), (3, 4)]
    exchanges = [_exchange(*time) for time in times]
    others = [_exchange(0, 50, rank=1, group=[0, 1]), _exchange(0, 50, group=[0])]
    merged = cli.merge([_process(0, *exchanges, *others)])
    trace_events.check(merged)
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
    unread = dataclasses.replace(_process(1, _exchange(1, 2, rank=1)), readings=[])
    for process in (_process(0, _exchange(0, 10)), unread):
        path = tmp_path / f"jaxhet-{process.process}.trace.json"
        path.write_text(process.to_json())
        schemas.check("trace", process.to_json())
        assert ProcessTrace.read(path) == process
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
    for text in ("{", "[]", '{"format": 1, "process": 0}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"jaxhet-0.trace.json is no trace of a process \("):
            cli.trace(tmp_path, output)
    path.write_text('{"format": 2}')
    with pytest.raises(UsageError, match=r"has format 2, and this jaxhet reads format 1; run"):
        cli.trace(tmp_path, output)
    path.write_text(_process(0).to_json())
    strange = tmp_path / "jaxhet-1.trace.json"
    strange.write_text(dataclasses.replace(_process(1), job="cd" * 16).to_json())
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
    trace.write()
    first = ProcessTrace.read(path)
    assert first.exchanges == [_exchange(1, 2)]
    assert first.transports == {1: ["process_vm", "socket"]}
    assert first.processes == [0, 1]
    assert all(abs(r.offset_us - 5e6) <= r.error_us for r in first.readings)
    engine.records.append(_exchange(3, 4))
    trace.close()
    assert len(ProcessTrace.read(path).exchanges) == 2
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
