"""Limit of the number of programs that a loop has started and that have not ended."""

from collections.abc import Sequence
from typing import Any

import jaxhet

# Programs that may be in flight at once. XLA's CPU client accepts 32 runs for each device. When a
# loop starts more, waiting launches occupy the threads that collectives of earlier runs need, and
# XLA ends the process after 40 s.
MOST_AHEAD = 16


def wait_for_earlier(results: Sequence[Any]) -> None:
    """Waits for the result that was started `MOST_AHEAD` before the last one, if there is one.

    Args:
      results: Results of all programs that the loop has started, in order: trees of arrays.
    """
    if len(results) > MOST_AHEAD:
        jaxhet.block_until_ready(results[-1 - MOST_AHEAD])
