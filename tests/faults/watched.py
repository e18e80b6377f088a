"""Starts a job and reads its lines as they come, with the time and process of each."""

import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from jaxhet.testing import FAST_COMPILE
from tests.support.commands import launch
from tests.support.jobs import PYTHONPATH, ROOT

_PREFIX = re.compile(r"^\[(\S+?)/(\d+)\] (.*)$")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of one process; `process` is None for the launcher's own."""

    time: float
    process: int | None
    text: str


class WatchedJob:
    """A job under `jaxhet launch`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        islands: int | tuple[int, int] = 3,  # or the number, and that of processes in each
        devices: int = 1,
        grace_s: float = 15,
        fast_compile: bool = False,
        env: Mapping[str, str] | None = None,
    ):
        number, processes = islands if isinstance(islands, tuple) else (islands, 1)
        shape = ["--islands", str(number), "--processes-per-island", str(processes)]
        options = [*shape, "--devices", str(devices), "--grace", str(grace_s)]
        self._process = subprocess.Popen(
            [sys.executable, *launch(*options), "-u", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "JAX_PLATFORMS": "cpu",
                **(FAST_COMPILE if fast_compile else {}),
                **(env or {}),
            },
            start_new_session=True,
        )
        self.lines: list[Line] = []
        self._new: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(
        self, pattern: str, process: int | None = None, timeout_s: float = 90
    ) -> re.Match[str]:
        """Waits for a line of `process` that holds `pattern`; looks at each line once."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._new.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no {pattern!r} within {timeout_s} s:\n{self.text()}"
                ) from None
            if line is None:
                self._new.put(None)
                raise AssertionError(f"the job ended without {pattern!r}:\n{self.text()}")
            if line.process == process and (match := re.search(pattern, line.text)):
                return match

    def wait(self, timeout_s: float = 90) -> int:
        """Waits for the end of the job; a job that does not end is killed, and an error.

        Call it once.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job hangs:\n{self.text()}") from None
        while self._new.get() is not None:
            pass
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    @property
    def pid(self) -> int:
        """The launcher's process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not ended yet."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the launcher at once; its processes end with it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def first(self, process: int | None, pattern: str, after: float = 0) -> Line | None:
        """The first line of `process` after a time that holds `pattern`."""
        return next(
            (
                x
                for x in self.lines
                if x.process == process and x.time >= after and re.search(pattern, x.text)
            ),
            None,
        )

    def text(self) -> str:
        """All lines, for a failed test."""
        return "\n".join(f"{x.time:.2f} {x.process} {x.text}" for x in self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            match = _PREFIX.match(raw.rstrip("\n"))
            process, text = (int(match[2]), match[3]) if match else (None, raw.rstrip("\n"))
            line = Line(time.monotonic(), process, text)
            self.lines.append(line)
            self._new.put(line)
        self._new.put(None)


def assert_others_report(
    job: WatchedJob, victim: int, num_processes: int, since: float, within_s: float
) -> None:
    """Checks that every process but `victim` reported PeerError naming it within the time.

    Also that nothing wrong was reported.
    """
    for process in set(range(num_processes)) - {victim}:
        line = job.first(process, rf"PeerError.*process {victim}\b", since)
        assert line is not None, f"process {process} did not name process {victim}:\n{job.text()}"
        late = line.time - since
        assert late <= within_s, f"process {process} reported after {late:.1f} s:\n{job.text()}"
    assert not any("WRONG" in x.text for x in job.lines), job.text()
    finished = {x.process for x in job.lines if x.text == "finished"}
    assert not finished, f"processes {finished} finished as if nothing had been:\n{job.text()}"
