"""The parts of a session that its metrics and traces read."""

import functools
from collections.abc import Sequence
from typing import Protocol

from jaxhet._ffi import Engine
from jaxhet._islands import Island


class ObservedSession(Protocol):
    """A session, as metrics and traces see it. Attributes: see `jaxhet._session.Session`."""

    replicas_checked: int
    replicas_differing: int

    @property
    def process(self) -> int: ...
    @property
    def islands(self) -> Sequence[Island]: ...
    @functools.cached_property
    def island(self) -> Island: ...
    @property
    def engine(self) -> Engine | None: ...
    def error(self) -> Exception | None: ...
