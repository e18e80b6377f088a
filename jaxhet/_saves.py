"""Saves that are under way in this process, and whether they make progress.

Progress is a change below the folder of a save: the number of files and folders, the sum of their
sizes, or the newest time of modification differs from the look before.
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Iterator

_LOOK_EVERY_S = 0.2
_LOOK_SHARE = 0.1  # largest share of time that looks at large folders take

Snapshot = tuple[int, int, int]  # entries, bytes, newest time of modification in ns


@dataclasses.dataclass(frozen=True, eq=False)
class Save:
    """One save.

    Attributes:
      folder: Folder that the save writes, or a single file.
      limit_s: Longest time that it may go on after a failure of the job, in seconds.
    """

    folder: pathlib.Path
    limit_s: float


class Saves:
    """Saves in progress. Any thread begins and ends them; one thread watches them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Save] = []
        self._seen: dict[Save, Snapshot] = {}
        self._next_look = 0.0

    @contextlib.contextmanager
    def under_way(self, save: Save) -> Iterator[None]:
        """Context of a save, which counts as under way inside."""
        with self._lock:
            self._under_way.append(save)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove(save)

    def current(self) -> list[Save]:
        """The saves under way, oldest first."""
        with self._lock:
            return list(self._under_way)

    def have_progressed(self, failed_for_s: float) -> bool:
        """Whether a save within its limit has changed its folder since the last look.

        Args:
          failed_for_s: Time since the failure of the job, in seconds.
        """
        now = time.monotonic()
        saves = [save for save in self.current() if failed_for_s < save.limit_s]
        if not saves or now < self._next_look:
            return False
        before, self._seen = self._seen, {save: _snapshot(save.folder) for save in saves}
        took = time.monotonic() - now
        self._next_look = now + max(_LOOK_EVERY_S, took / _LOOK_SHARE)
        return any(before.get(save, found) != found for save, found in self._seen.items())

    def losses(self, failed_for_s: float, still_s: float) -> list[str]:
        """For each save that is no longer waited for, a sentence with the reason.

        Args:
          failed_for_s: Time since the failure of the job, in seconds.
          still_s: Time without progress, in seconds.
        """
        return [
            f"the save to {save.folder} is not complete: "
            + (
                f"nothing has changed there for {still_s:g} s"
                if failed_for_s < save.limit_s
                else f"{save.limit_s:g} s after the failure (limit_s of jaxhet.saving) it goes on"
            )
            for save in self.current()
        ]


def _snapshot(folder: pathlib.Path) -> Snapshot:
    """The state of a folder, with all that is below it; links are not followed."""
    count = num_bytes = newest_ns = 0
    for path in _paths(folder):
        with contextlib.suppress(OSError):  # deleted meanwhile
            found = os.lstat(path)
            count += 1
            num_bytes += found.st_size
            newest_ns = max(newest_ns, found.st_mtime_ns)
    return count, num_bytes, newest_ns


def _paths(folder: pathlib.Path) -> Iterator[str]:
    yield str(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield os.path.join(parent, name)
