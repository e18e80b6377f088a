"""A process that the launcher watches: its process group, its output, and its end."""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO

from jaxhet._launch import told
from jaxhet.cli import _guardian
from jaxhet.cli._lines import LineSplitter

_READ_BYTES = 64 * 1024
# The lines that JAX and Grain add below the text of an exception.
_NOTE = re.compile(r"-{20}$|For simplicity, \w+ has removed its internal frames")
_OUR_ERROR = re.compile(r"jaxhet\.(\w+\.)*\w+Error\b.*")

# The process that an error names, as `xla_plugin/engine/common/messages.cc` names it.
_NAMED = re.compile(r"jaxhet\.PeerError: .*?\bprocess (\d+) \(")


def ending(returncode: int) -> str:
    """Words for the end of a process; `returncode` is -n for signal n, as in `subprocess`."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"


class Process:
    """A process with a group of its own, which the guardian ends should the launcher die."""

    def __init__(
        self,
        label: str,
        command: list[str],
        env: Mapping[str, str],
        guardian_fd: int,
        stdin: int,
    ):
        self.label = label
        self.returncode: int | None = None
        self.group_is_gone = False
        # The last signal that the launcher sent on its own.
        self.stopped_by: signal.Signals | None = None
        self.knows_failure = False  # it has said that it knows of the failure of its job
        self._our_error = ""
        self._last_stderr = ""
        self._outputs: dict[IO[bytes], LineSplitter] = {}
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _guardian.__file__, str(guardian_fd), *command],
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            pass_fds=(guardian_fd,),
        )

    def signal_group(self, number: int) -> bool:
        """Signals the group; returns whether it exists (number 0 only asks)."""
        if self.group_is_gone:  # another group may have the number by now
            return False
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            return False
        return True

    def remember(self, line: bytes) -> bytes | None:
        """Keeps the part of a line of stderr that the summary quotes; returns the part to show."""
        if (rest := told.remove(line)) is not None:
            self.knows_failure = True
            return rest or None
        text = line.decode(errors="replace").strip()
        if match := _OUR_ERROR.search(text):
            self._our_error = match[0]
        if text and not _NOTE.match(text):
            self._last_stderr = text
        return line

    def summary(self) -> str:
        """The end of the process and, after a failure, its last words."""
        if self.returncode is None:
            return f"{self.label}: still running"
        how = ending(self.returncode)
        if self.stopped_by:
            how += f" (the launcher sent {self.stopped_by.name})"
        said = self.last_words if self.returncode else ""
        return f"{self.label}: {how}" + (f"; it said: {said}" if said else "")

    @property
    def named(self) -> int | None:
        """The number of the process that its error names, if it names one."""
        found = _NAMED.match(self._our_error)
        return None if found is None else int(found[1])

    @property
    def last_words(self) -> str:
        """Line of stderr that explains a failure: an error of jaxhet, else the last line."""
        return self._our_error or self._last_stderr

    def watch(
        self,
        selector: selectors.BaseSelector,
        stream: IO[bytes] | None,
        emit: Callable[[bytes], None],
    ) -> None:
        """Passes every line of `stream` to `emit`; `selector` holds the callback as its data."""
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        self._outputs[stream] = LineSplitter(emit)
        selector.register(stream, selectors.EVENT_READ, lambda: self._read(selector, stream))

    def close_outputs(self, selector: selectors.BaseSelector) -> None:
        """Reads the rest of the output. A process outside the group may still hold it open."""
        for stream in list(self._outputs):
            while self._read(selector, stream):
                pass
            if stream in self._outputs:
                self._close(selector, stream)

    def _read(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> bool:
        try:
            data = os.read(stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        self._outputs[stream].feed(data)
        if not data:
            self._close(selector, stream)
        return bool(data)

    def _close(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> None:
        selector.unregister(stream)
        stream.close()
        self._outputs.pop(stream).flush()


def start_guardian(stack: contextlib.ExitStack) -> int:
    """Starts the guardian; returns the pipe to it, whose end is the guardian's."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", _guardian.__file__],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    stack.callback(guardian.wait)
    stack.enter_context(guardian.stdin)
    return guardian.stdin.fileno()
