"""Splitter of a process's output into whole lines."""

import os
import select
from collections.abc import Callable

_LONGEST_LINE_BYTES = 1024 * 1024


class LineSplitter:
    """Splits bytes, as they arrive, into lines and hands each, without its end, to `emit`.

    A progress bar rewrites its line with carriage returns: only the last form is handed on. A
    line of more than 1 MiB is cut.
    """

    def __init__(self, emit: Callable[[bytes], None]):
        self._emit = emit
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Processes the next bytes."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(_last_form(line))
        start = rest.rfind(b"\r", 0, -1)  # text before it will not be shown
        self._rest = rest[max(start, 0) :]
        if len(self._rest) > _LONGEST_LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Passes on the beginning of an unfinished line."""
        if self._rest:
            self._emit(_last_form(self._rest))
        self._rest = b""


def _last_form(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def write(fd: int, data: bytes) -> None:
    """Writes all of `data`. Waits for a slow reader, whether or not `fd` is blocking.

    Raises:
      OSError: it can't be written, for example because a disk is full or nobody reads any more.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(fd, select.POLLOUT)
            writable.poll()
