"""Waits for other processes."""

import pathlib
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Polls `condition` until it is true; fails the test after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true in {timeout_s:g} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
