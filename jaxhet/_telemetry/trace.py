"""The last exchanges of this process, as a file that `jaxhet trace` reads.

The engine keeps them in flight recorders: 4096 for each process, and for each of its GPUs.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import threading
from typing import TYPE_CHECKING, Any

from jaxhet._config import Config
from jaxhet._errors import UsageError
from jaxhet._job.clock import Reading, now_us
from jaxhet._log import LOGGER
from jaxhet._telemetry.observed import ObservedSession, Observer

if TYPE_CHECKING:
    from jaxhet._job.membership import Membership

FILES = "jaxhet-*.trace.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ProcessTrace:
    """Exchanges of one process. Times are on the process's own clock, in microseconds.

    Attributes:
      job: Id of the job, in hexadecimal digits.
      process: Process id in the job.
      island: Name of the process's island.
      host: Name of the machine.
      pid: Process id on the machine.
      written_us: Time of this report.
      processes: Process of each rank.
      transports: Transports that have moved bytes to or from a process, by process.
      readings: Readings of the coordinator's clock, oldest first.
      exchanges: Records of `Engine.flight_record`.
    """

    job: str
    process: int
    island: str
    host: str
    pid: int
    written_us: float
    processes: list[int]
    transports: dict[int, list[str]]
    readings: list[Reading]
    exchanges: list[dict[str, Any]]

    def to_json(self) -> str:
        """The content of a file."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, path: pathlib.Path) -> "ProcessTrace":
        """The trace in a file.

        Raises:
          UsageError: The file has another format.
        """
        try:
            fields = json.loads(path.read_text())
            written = fields.pop("format")
            if written != _FORMAT:
                raise UsageError(
                    f"{path} has format {written}, and this jaxhet reads format {_FORMAT}; run"
                    " `jaxhet trace` of the version that wrote the file"
                )
            fields["readings"] = [Reading(**reading) for reading in fields["readings"]]
            fields["transports"] = {int(p): names for p, names in fields["transports"].items()}
            return cls(**fields)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no trace of a process ({error}); remove it, or name the folder of"
                " JAXHET_TRACE_FOLDER"
            ) from error


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

    def __init__(self, folder: pathlib.Path, session: ObservedSession, membership: "Membership"):
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
        """Writes the file on a thread: a file system that hangs must not hold up the caller."""
        threading.Thread(target=self.write, name="jaxhet-trace", daemon=True).start()

    def close(self) -> None:
        """Writes the file a last time. The engine must still be open."""
        with self._lock:
            if not self._is_closed:
                self._write()
            self._is_closed = True

    def _read_clock(self) -> None:
        if (reading := self._clock.read()) is not None:
            self._readings.append(reading)

    def _write(self) -> None:
        if self._session.error() is None:  # the coordinator may be what failed
            self._read_clock()
        path = self._folder / f"jaxhet-{self._session.process}.trace.json"
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(self._report().to_json())
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

    def _report(self) -> ProcessTrace:
        session, engine = self._session, self._session.engine
        process_of = {
            rank: device.process_index
            for island in session.islands
            for rank, device in zip(island.ranks, island.devices, strict=True)
        }
        transports: dict[int, set[str]] = {}
        for peer in engine.peer_stats() if engine else ():
            if peer["bytes_sent"] or peer["bytes_received"]:
                transports.setdefault(peer["process"], set()).add(peer["transport"])
        return ProcessTrace(
            job=self._job,
            process=session.process,
            island=session.island.name,
            host=platform.node(),
            pid=os.getpid(),
            written_us=now_us(),
            processes=[process_of[rank] for rank in range(len(process_of))],
            transports={process: sorted(names) for process, names in transports.items()},
            readings=self._readings,
            exchanges=engine.flight_record() if engine else [],
        )
