"""Hides what Orbax's threads report about a save that failed.

`models.extras.checkpoint` raises one error for it. Orbax and TensorStore also write tracebacks for
arrays and threads: hundreds of lines around that error, and some after it.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

# Text of the error that TensorStore meets when it reports to a thread of Orbax that has ended.
_CLOSED = "Event loop is closed"


def hide_reports_of_saves() -> None:
    """Hides these reports until the process ends. For programs, not for libraries."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_kept)
    sys.unraisablehook = _without_closed_loops(sys.unraisablehook)


def _is_kept(record: logging.LogRecord) -> bool:
    return "orbax" not in f"{record.pathname} {record.getMessage()}" or record.exc_info is None


def _without_closed_loops(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != _CLOSED:
            report(unraisable)

    return hook
