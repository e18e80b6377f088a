"""Connects this process to peers when a program needs them, in jobs that do not connect all.

A process that needs peers names them to the coordinator, which tells these, and answers which have
left. The other end connects on a thread of its own, wherever its program is.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence

from jaxhet._errors import JaxhetError, PeerError, TransportError, UsageError
from jaxhet._job import bootstrap
from jaxhet._job.listener import Listener
from jaxhet._job.membership import Membership
from jaxhet._job.process_info import ProcessInfo

_AT_ONCE = 8  # peers to which a program's thread connects at a time
_MOST_AT_START = 16  # processes of a job that connects all, if the user does not say


def connects_all(choice: str, members: Sequence[ProcessInfo]) -> bool:
    """Whether every two processes connect at the start. Pure.

    Args:
      choice: The option `connect`.
      members: All processes.
    """
    return choice == "all" or (choice == "auto" and len(members) <= _MOST_AT_START)


def partners(process: int, members: Sequence[ProcessInfo]) -> set[int]:
    """Processes to which a process connects at the start where not all are connected. Pure.

    They have the same place, modulo the size of an island, on the previous and the next island, so
    that every process has a peer that notices its silence. Processes with GPUs also connect to the
    processes of their host, whose devices share memory with theirs.
    """
    islands: dict[str, list[int]] = {}
    for info in members:
        islands.setdefault(info.island, []).append(info.process)
    lists = list(islands.values())
    found = set()
    for own, following in zip(lists, [*lists[1:], lists[0]], strict=True):
        for place, one in enumerate(own):
            other = following[place % len(following)]
            found |= {one, other} if process in (one, other) else set()
    own = members[process]
    if own.platform != "cpu":
        found |= {info.process for info in members if info.host_id == own.host_id}
    return found - {process}


class Connector:
    """Connections of this process to peers, made when they are needed.

    Args:
      listener: The listener of this process; the connector closes it.
      members: All processes.
      connected: Peers that are connected.
      open_peer: Connects a peer and gives it to the engine; blocks. It calls its second argument
        meanwhile.
      membership: The connection to the coordinator.
    """

    def __init__(
        self,
        listener: Listener,
        members: Sequence[ProcessInfo],
        connected: Iterable[int],
        open_peer: Callable[[ProcessInfo, Callable[[], None]], None],
        membership: Membership,
    ):
        self._listener = listener
        self._members = members
        self._open_peer = open_peer
        self._membership = membership
        self._lock = threading.Lock()
        self._absent: set[int] = set()  # peers that have left the job
        # Done when the peer is connected, or can't be; running while a thread connects it.
        self._connections: dict[int, concurrent.futures.Future[None]] = {
            info.process: concurrent.futures.Future() for info in members
        }
        for process in connected:
            self._connections[process].set_result(None)
        self._fail: Callable[[JaxhetError], None] = lambda error: None
        self._is_closing = False

    def start(self, fail: Callable[[JaxhetError], None]) -> None:
        """Lets peers connect from now on.

        Args:
          fail: Called with an error of a connection that a peer needs.
        """
        self._fail = fail
        self._membership.listen_needs(self._needed_by, self._is_absent)

    def need(self, processes: Iterable[int]) -> None:
        """Returns when all these peers are connected.

        Raises:
          PeerError: One has left the job.
          TransportError: One can't be reached.
        """
        needed = sorted(processes)
        waiting = [p for p in needed if not self._connections[p].done()]
        if waiting:
            self._membership.ask_for(waiting)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:  # peers may be slow
            list(pool.map(self._connect, waiting))
        for process in needed:  # another thread may connect it, or may have failed
            self._connections[process].result()

    def has(self, process: int) -> bool:
        """Whether a peer is connected."""
        connection = self._connections[process]
        return connection.done() and connection.exception() is None

    def close(self) -> None:
        """Stops listening, and makes no more connections."""
        self._is_closing = True
        self._listener.close()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the listening sockets."""
        self._listener.close_in_child()

    def _connect(self, process: int) -> None:
        """Connects a peer, unless another thread does."""
        connection = self._connections[process]
        with self._lock:
            if connection.running() or connection.done():
                return
            connection.set_running_or_notify_cancel()
        try:
            self._open(process)
        except Exception as error:  # a waiting thread must learn of every error
            info = self._members[process]
            other = TransportError(f"no connection to {info}: {error!r}")
            ours = error if isinstance(error, JaxhetError) else other
            if not self._is_closing:
                self._fail(ours)
            connection.set_exception(ours)
        else:
            connection.set_result(None)

    def _open(self, process: int) -> None:
        def check() -> None:
            self._check(process)

        check()
        try:
            self._open_peer(self._members[process], check)
        except JaxhetError:
            if not self._is_closing:
                bootstrap.wait_for_reason(check)
            raise

    def _check(self, process: int) -> None:
        if self._is_closing:
            raise UsageError("jaxhet is shut down in this process")
        self._membership.check()
        if process in self._absent:
            raise PeerError(
                f"{self._members[process]} has left the job: its program ended or called"
                " jaxhet.shutdown. All processes must run the same programs."
            )

    def _needed_by(self, process: int) -> None:
        """A peer needs this process; must not block.

        In exit hooks Python starts no thread. The peer gets an error when this process has left.
        """
        thread = threading.Thread(
            target=self._connect, args=(process,), name="jaxhet-connect", daemon=True
        )
        with contextlib.suppress(RuntimeError):
            thread.start()

    def _is_absent(self, process: int) -> None:
        self._absent.add(process)
