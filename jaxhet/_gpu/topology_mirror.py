"""Gives a job of several vendors one set of devices.

Each process puts a message about its devices into JAX's key-value store, under the names of its
plugin. Process 0 reads all processes' messages under the names of its own plugin and puts the whole
there; every other process reads it under the names of its own. The messages are of one kind,
whatever the vendor: copies under the other names bring the two sides together.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxhet._errors import JaxhetError, PeerError
from jaxhet._jax import compat
from jaxhet._job.process_info import ProcessInfo

# XLA gives up after 2 minutes, with an error that names no process.
TIMEOUT_S = 110.0


class Copy(NamedTuple):
    """A message to copy from one key to another, and the process that writes it."""

    info: ProcessInfo
    source: str
    target: str


def copies(members: Sequence[ProcessInfo]) -> list[Copy]:
    """Copies to make, in the order of writing; none for one vendor. Pure."""
    first = members[0]
    others = [info for info in members if info.topology != first.topology]
    inwards = [
        Copy(
            info,
            compat.local_topology_key(info.topology, info.process),
            compat.local_topology_key(first.topology, info.process),
        )
        for info in others
    ]
    whole = compat.global_topology_key(first.topology)
    outwards = [
        Copy(first, whole, compat.global_topology_key(topology))
        for topology in dict.fromkeys(info.topology for info in others)
    ]
    return inwards + outwards


class TopologyMirror:
    """Copies the messages on a thread of process 0, which ends after the last message."""

    def __init__(self, client: Any, members: Sequence[ProcessInfo], timeout_s: float = TIMEOUT_S):
        """Starts the thread. `client` is JAX's client of the coordination service."""
        self._client = client
        self._copies = copies(members)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._error: JaxhetError | None = None
        self._thread = threading.Thread(target=self._run, name="jaxhet-topology", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the thread's error, if there is one.

        Raises:
          PeerError: a process did not publish its devices in time.
        """
        if self._error:
            raise self._error

    def finish(self) -> None:
        """Waits until everything is copied; raises as `check`."""
        self._thread.join()
        self.check()

    def _run(self) -> None:
        for number, copy in enumerate(self._copies):
            left_ms = max(1, round((self._deadline_s - time.monotonic()) * 1000))
            try:
                message = self._client.blocking_key_value_get_bytes(copy.source, left_ms)
            except jax.errors.JaxRuntimeError as error:
                self._error = self._missing(number, error)
                return
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # an answer that unblocks it
                self._client.key_value_set_bytes(copy.target, message)

    def _missing(self, number: int, error: Exception) -> PeerError:
        """The error that names the processes without a message."""
        left = {c.info.process: c for c in self._copies[number:] if not self._has(c.source)}
        if len(left) > 1:
            left.pop(0, None)  # it waits for the others
        who = ", ".join(str(c.info) for c in left.values() or self._copies[number : number + 1])
        return PeerError(
            f"{who} did not publish its devices within {self._timeout_s:g} s"
            f" ({str(error).partition('\n')[0]}); its output says why its backend did not start"
        )

    def _has(self, key: str) -> bool:
        try:
            self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError:
            return False
        return True
