"""`jaxhet trace`: the last exchanges of all processes on one clock, for a browser.

The file has the JSON Object Format of Chrome's "Trace Event Format", which Perfetto reads too.
"""

import heapq
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from jaxhet._errors import UsageError
from jaxhet._telemetry.trace import FILES, ProcessTrace

Event = dict[str, Any]


def trace(
    folder: Annotated[
        pathlib.Path, typer.Argument(metavar="FOLDER", help="JAXHET_TRACE_FOLDER of the job")
    ],
    output: Annotated[
        pathlib.Path, typer.Option("--output", "-o", metavar="FILE", help="file to write")
    ] = pathlib.Path("trace.json"),
) -> None:
    """Merge the last exchanges of a job's processes into one trace for Perfetto or Chrome.

    With JAXHET_TRACE_FOLDER each process writes its last exchanges to that folder when it leaves
    or the job fails. Copy the files of all hosts into FOLDER. Rows are ranks and transports. Times
    are on the coordinator's clock, which each process has measured.
    """
    processes = [ProcessTrace.read(path) for path in sorted(folder.glob(FILES))]
    if not processes:
        raise UsageError(
            f"{folder} has no {FILES}; start the job with JAXHET_TRACE_FOLDER={folder}: each"
            " process writes its file there when it leaves or the job fails"
        )
    _check_same_job(folder, processes)
    merged = merge(processes)
    try:
        output.write_text(json.dumps(merged))
    except OSError as error:
        raise UsageError(
            f"can't write the trace to {output}: {error.strerror}; choose another file (-o)"
        ) from None
    for line in _summary(processes):
        print(line)
    print(f"wrote {output}; open it at https://ui.perfetto.dev or chrome://tracing")


def _check_same_job(folder: pathlib.Path, processes: Sequence[ProcessTrace]) -> None:
    first = processes[0]
    for other in processes:
        if other.job != first.job:
            raise UsageError(
                f"{folder} has files of several jobs: process {first.process} was in job"
                f" {first.job}, process {other.process} in job {other.job}; remove the files of one"
                " job, and give each job its own JAXHET_TRACE_FOLDER"
            )


def merge(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """One trace. Times are on the coordinator's clock and begin with the first exchange."""
    begin_us = min(
        (_on_job_clock(p, e["started_us"]) for p in processes for e in p.exchanges), default=0.0
    )
    # Perfetto takes a thread 0, and one with the number of its process, for the same main thread.
    threads = itertools.count(1 + max((p.process for p in processes), default=0))
    events = [event for p in processes for event in _events(p, begin_us, threads)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            f"largest clock error of process {p.process}, in us": error_us(p) for p in processes
        },
    }


def error_us(process: ProcessTrace) -> float | None:
    """Largest error of a process's times on the coordinator's clock; None: unknown."""
    return max((reading.error_us for reading in process.readings), default=None)


def _on_job_clock(process: ProcessTrace, local_us: float) -> float:
    """A process's time on the coordinator's clock, whose offset changes linearly."""
    if not process.readings:
        return local_us
    first, last = process.readings[0], process.readings[-1]
    span_us = last.local_us - first.local_us
    share = (local_us - first.local_us) / span_us if span_us else 0.0
    return local_us + first.offset_us + share * (last.offset_us - first.offset_us)


def _events(process: ProcessTrace, begin_us: float, threads: Iterator[int]) -> Iterator[Event]:
    """The process's name, then rows of exchanges, by rank and transport, with the rows' names.

    Each row is one of `threads`.
    """
    own = {"ph": "M", "pid": process.process}
    name = f"{process.island}: process {process.process} (pid {process.pid} on {process.host})"
    yield {**own, "name": "process_name", "args": {"name": name}}
    yield {**own, "name": "process_sort_index", "args": {"sort_index": process.process}}
    rows: dict[tuple[int, str], list[Event]] = {}
    for exchange in process.exchanges:
        event = _exchange(process, exchange, begin_us)
        rows.setdefault((exchange["rank"], event["args"]["transport"]), []).append(event)
    for (rank, transport), events in sorted(rows.items()):
        for lane, members in enumerate(_lanes(events)):
            thread = next(threads)
            title = f"rank {rank}, {transport}" + (f" ({lane + 1})" if lane else "")
            yield {**own, "tid": thread, "name": "thread_name", "args": {"name": title}}
            yield from ({**event, "tid": thread} for event in members)


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """The events in as few rows as possible; events of a row do not overlap."""
    lanes: list[list[Event]] = []
    ends: list[tuple[float, int]] = []
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        if ends and ends[0][0] <= event["ts"]:
            _, lane = heapq.heapreplace(ends, (end, ends[0][1]))
        else:
            lane = len(lanes)
            lanes.append([])
            heapq.heappush(ends, (end, lane))
        lanes[lane].append(event)
    return lanes


def _exchange(process: ProcessTrace, exchange: dict[str, Any], begin_us: float) -> Event:
    """An exchange. If it is not over, it lasts until its process wrote the file."""
    start = _on_job_clock(process, exchange["started_us"])
    is_over = exchange["state"] != "started"
    end = _on_job_clock(process, exchange["ended_us"] if is_over else process.written_us)
    peers = [rank for rank in exchange["group"] if rank != exchange["rank"]]
    names = {name for rank in peers for name in process.transports.get(process.processes[rank], ())}
    same = ("bytes", "state", "index", "run", "sequence", "exchange")
    return {
        "ph": "X",
        "name": exchange["kind"],
        "cat": "exchange",
        "pid": process.process,
        "ts": round(start - begin_us, 3),
        "dur": round(max(end - start, 0.0), 3),
        "args": {
            "peers": peers,
            "transport": "+".join(sorted(names)) or "local",
            "plan": str(exchange["plan"]),  # has more digits than a browser's numbers
            **{name: exchange[name] for name in same},
        },
    }


def _summary(processes: Sequence[ProcessTrace]) -> Iterator[str]:
    for process in processes:
        error = error_us(process)
        clock = (
            "it never read the coordinator's clock: its times are on its own host's clock"
            if error is None
            else f"clock known within {error:.0f} us"
        )
        yield f"process {process.process}: {len(process.exchanges)} exchanges; {clock}"
