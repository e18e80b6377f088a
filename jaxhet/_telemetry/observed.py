"""The parts of a session that its metrics and traces read."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # `jaxhet trace` does without JAX
    from jaxhet._ffi import Engine
    from jaxhet._islands import Island


class Observer:
    """Receiver of the events at the end of a session."""

    def failed(self) -> None:
        """The job has failed. Must not block."""

    def close(self) -> None:
        """The process leaves the job. The engine is still open."""

    def close_in_child(self) -> None:
        """This process is a fork of the one that joined the job."""


class ObservedSession(Protocol):
    """A session, as metrics and traces see it. Attributes: see `jaxhet._session.Session`."""

    replicas_checked: int
    replicas_differing: int

    @property
    def process(self) -> int: ...
    @property
    def islands(self) -> Sequence["Island"]: ...
    @functools.cached_property
    def island(self) -> "Island": ...
    @property
    def engine(self) -> "Engine | None": ...
    def error(self) -> Exception | None: ...
