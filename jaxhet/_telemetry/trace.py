"""The last exchanges of this process, as a file for Perfetto or Chrome.

The engine keeps them in flight recorders: 4096 for each process, and for each of its GPUs. The file
has the JSON Object Format of Chrome's "Trace Event Format". Times are on the coordinator's clock;
`jaxhet trace` joins the files of a job.
"""

import contextlib
import heapq
import json
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxhet._config import Config
from jaxhet._errors import UsageError
from jaxhet._job.clock import Reading, now_us
from jaxhet._log import LOGGER
from jaxhet._session import Observer, Session
from jaxhet._telemetry import TRACE_FILE

if TYPE_CHECKING:
    from jaxhet._job.membership import Membership

_MOST_ROWS = 100_000  # limit for the rows of a process

Event = dict[str, Any]


def folder(config: Config) -> pathlib.Path | None:
    """The folder for traces that the user has set, or None.

    Raises:
      UsageError: The folder does not exist.
    """
    if not config.trace_folder:
        return None
    found = pathlib.Path(config.trace_folder)
    if not found.is_dir():
        raise UsageError(f"JAXHET_TRACE_FOLDER {found} is no folder; make it, or name another one")
    return found


class Trace(Observer):
    """Writes the trace of a session when the job fails, and when this process leaves."""

    def __init__(self, folder: pathlib.Path, session: Session, membership: "Membership"):
        self._folder = folder
        self._session = session
        self._job = membership.job.hex()
        self._clock = membership.clock
        self._lock = threading.Lock()
        self._is_closed = False
        self._readings: list[Reading] = []
        self._read_clock()

    def write(self) -> None:
        """Writes the file, or writes it anew."""
        with self._lock:
            if not self._is_closed:
                self._write()

    def failed(self) -> None:
        """Writes the file on a thread: a file system that hangs must not hold up the caller.

        In exit hooks Python starts no thread, and `close` writes the file.
        """
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.write, name="jaxhet-trace", daemon=True).start()

    def close(self) -> None:
        """Writes the file a last time. The engine must still be open."""
        self.write()
        self._is_closed = True

    def _read_clock(self) -> None:
        if (reading := self._clock.read()) is not None:
            self._readings.append(reading)

    def _write(self) -> None:
        if self._session.error() is None:  # the coordinator may be what failed
            self._read_clock()
        path = self._folder / TRACE_FILE.format(self._session.process)
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(self._content()))
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            LOGGER.warning(
                "process %d can't write its trace to %s: %s; make room there or choose another"
                " JAXHET_TRACE_FOLDER",
                self._session.process,
                path,
                error.strerror,
            )

    def _content(self) -> dict[str, Any]:
        session, engine = self._session, self._session.engine
        transports: dict[int, set[str]] = {}  # by process, if they moved bytes
        for peer in engine.peer_stats() if engine else ():
            if peer["bytes_sent"] or peer["bytes_received"]:
                transports.setdefault(peer["process"], set()).add(peer["transport"])
        of_rank = {
            rank: transports.get(device.process_index, set())
            for island in session.islands
            for rank, device in zip(island.ranks, island.devices, strict=True)
        }
        where = f"{session.island.name}: process {session.process}"
        return {
            "traceEvents": [
                *events(
                    engine.flight_record() if engine else [],
                    of_rank,
                    process=session.process,
                    title=f"{where} (pid {os.getpid()} on {platform.node()})",
                    on_job_clock=lambda local_us: on_job_clock(self._readings, local_us),
                )
            ],
            "displayTimeUnit": "ms",
            "otherData": {
                "job": self._job,
                "process": session.process,
                "clock_error_us": max((r.error_us for r in self._readings), default=None),
            },
        }


def on_job_clock(readings: Sequence[Reading], local_us: float) -> float:
    """A process's time on the coordinator's clock, whose offset changes linearly. Pure.

    Args:
      readings: Readings of the coordinator's clock, oldest first; without one, the process's own
        clock counts.
      local_us: Time of the process's clock.
    """
    if not readings:
        return local_us
    first, last = readings[0], readings[-1]
    span_us = last.local_us - first.local_us
    share = (local_us - first.local_us) / span_us if span_us else 0.0
    return local_us + first.offset_us + share * (last.offset_us - first.offset_us)


def events(
    exchanges: Sequence[Mapping[str, Any]],
    transports: Mapping[int, set[str]],
    *,
    process: int,
    title: str,
    on_job_clock: Callable[[float], float],
) -> Iterator[Event]:
    """The process's name, then rows of exchanges, by rank and transport, with the rows' names.

    Args:
      exchanges: Records of `Engine.flight_record`.
      transports: Transports that have moved bytes to or from the process of a rank, by rank.
      process: Number of the process.
      title: Name of the process in the trace.
      on_job_clock: Converts a time of the process's clock.
    """
    own = {"ph": "M", "pid": process}
    yield {**own, "name": "process_name", "args": {"name": title}}
    yield {**own, "name": "process_sort_index", "args": {"sort_index": process}}
    now, rows = on_job_clock(now_us()), {}
    for exchange in exchanges:
        start = on_job_clock(exchange["started_us"])
        # Without an end it lasts until now.
        end = now if exchange["state"] == "started" else on_job_clock(exchange["ended_us"])
        event = _event(exchange, transports)
        event |= {"ts": round(start, 3), "dur": round(max(end - start, 0.0), 3)}
        rows.setdefault((exchange["rank"], event["args"]["transport"]), []).append(event)
    # Perfetto takes a thread 0, and one with the number of its process, for the same main thread.
    thread = (process + 1) * _MOST_ROWS
    for (rank, transport), row in sorted(rows.items()):
        for lane, members in enumerate(_lanes(row)):
            thread += 1
            name = f"rank {rank}, {transport}" + (f" ({lane + 1})" if lane else "")
            yield {**own, "tid": thread, "name": "thread_name", "args": {"name": name}}
            yield from ({**event, "pid": process, "tid": thread} for event in members)


def _event(exchange: Mapping[str, Any], transports: Mapping[int, set[str]]) -> Event:
    """The event of an exchange, without its times."""
    peers = [rank for rank in exchange["group"] if rank != exchange["rank"]]
    names = {name for rank in peers for name in transports[rank]}
    same = ("bytes", "state", "index", "run", "sequence", "exchange")
    return {
        "ph": "X",
        "name": exchange["kind"],
        "cat": "exchange",
        "args": {
            "peers": peers,
            "transport": "+".join(sorted(names)) or "local",
            "plan": str(exchange["plan"]),  # a number of a browser has too few digits
            **{name: exchange[name] for name in same},
        },
    }


def _lanes(row: Sequence[Event]) -> list[list[Event]]:
    """The events in as few rows as possible; events of a row do not overlap."""
    lanes: list[list[Event]] = []
    ends: list[tuple[float, int]] = []
    for event in sorted(row, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        if ends and ends[0][0] <= event["ts"]:
            _, lane = heapq.heapreplace(ends, (end, ends[0][1]))
        else:
            lane = len(lanes)
            lanes.append([])
            heapq.heappush(ends, (end, lane))
        lanes[lane].append(event)
    return lanes
