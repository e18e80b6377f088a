"""Events of a job for listeners of `jax.monitoring`; docs/guides/metrics.md lists them.

JAX calls a listener on the thread that records. A listener that raises must stop neither the job
nor the thread that watches it: its error is logged, and the program goes on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.monitoring

from jaxhet._log import LOGGER

JOINED = "/jaxhet/joined"
FAILED = "/jaxhet/failed"
PATH_FAILED = "/jaxhet/path_failed"
REPLICAS_CHECKED = "/jaxhet/replicas_checked"
REPLICAS_DIFFERING = "/jaxhet/replicas_differing"


class Events:
    """Records the events of one process."""

    def __init__(self, process: int, island: str):
        self._own = {"process": process, "island": island}
        self._path_failures: dict[tuple[int, str], int] = {}

    def joined(self, seconds: float) -> None:
        """`jaxhet.initialize` returns after so many seconds."""
        _record(jax.monitoring.record_event_duration_secs, JOINED, seconds, **self._own)

    def failed(self, error: str) -> None:
        """The job has failed with an error of the class of this name."""
        _record(jax.monitoring.record_event, FAILED, error=error, **self._own)

    def replicas_checked(self, checked: int, differing: int) -> None:
        """Replicas of so many arrays were compared."""
        _record(jax.monitoring.record_scalar, REPLICAS_CHECKED, checked, **self._own)
        _record(jax.monitoring.record_scalar, REPLICAS_DIFFERING, differing, **self._own)

    def count_path_failures(self, peers: Iterable[Mapping[str, Any]]) -> None:
        """Records the path failures that are new in the counters of `Engine.peer_stats`."""
        for peer in peers:
            key, failures = (peer["process"], peer["transport"]), peer["path_failures"]
            for _ in range(failures - self._path_failures.get(key, 0)):
                _record(
                    jax.monitoring.record_event,
                    PATH_FAILED,
                    peer=peer["process"],
                    transport=peer["transport"],
                    **self._own,
                )
            self._path_failures[key] = failures


def _record(record: Callable[..., None], event: str, *values: float, **labels: str | int) -> None:
    try:
        record(event, *values, **labels)
    except Exception as error:
        LOGGER.warning("a listener of jax.monitoring failed at %s: %r", event, error)
