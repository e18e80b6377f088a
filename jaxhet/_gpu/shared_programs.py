"""Executables that processes with equal GPUs get from the first of them that runs a program.

XLA measures candidates for its kernels when it compiles, and two measurements may end in two
choices: sums that should be equal on all replicas then differ in their last bits. So the processes
of a *tuning class* (equal devices, versions and flags) run one executable. The first process of the
class that takes part in a program compiles it, and puts the executable into the key-value store of
JAX's coordination service. The others wait for it there, and load it:

    jaxhet/executable/<key>   "+", then the executable; or "-", then why the process has none
    jaxhet/compiling/<first>  JSON: what the first process is doing (`_Doing`)

*key* is a digest of the module that JAX hands to XLA, and of XLA's options for it. A wait ends
early when the first process has left the job, or has compiled another program instead.
"""

import collections
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

_MOST_KEPT_BYTES = 512 << 20  # executables of this process in the store: the latest ones
_POLL_S = 0.5
_GRACE_S = 3.0  # threads of a process may compile programs in another order than elsewhere


class NotSharedError(Exception):
    """A process could not get an executable from another one, for the reason in the text."""


@dataclasses.dataclass
class _Doing:
    """Work of a process that compiles for others.

    Attributes:
      compiling: Keys of programs that it compiles now.
      latest: For each group of processes, as text, the key of the program it compiled last.
      has_left: Whether it has left the job.
    """

    compiling: list[str] = dataclasses.field(default_factory=list)
    latest: dict[str, str] = dataclasses.field(default_factory=dict)
    has_left: bool = False


class SharedPrograms:
    """Exchanges executables with the other processes of a tuning class. Any thread may call it."""

    def __init__(
        self,
        members: Sequence[int],
        process: int,
        store: Any,
        timeout_s: float,
    ):
        """Shares with the other processes of a class.

        Args:
          members: The processes of the class.
          process: This process.
          store: Client of JAX's coordination service.
          timeout_s: Longest wait for an executable.
        """
        self._members = frozenset(members)
        self._process = process
        self._store = store
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._known: set[str] = set()  # keys of programs that this process has or compiles
        self._doing = _Doing()
        self._kept: collections.OrderedDict[str, int] = collections.OrderedDict()  # key to size

    def among(self, processes: Collection[int]) -> tuple[int, ...]:
        """The processes that share a program; the first of them compiles it.

        Args:
          processes: The processes whose devices run the program.

        Returns:
          Processes of this process's class; none if it does not share the program.
        """
        found = tuple(sorted(self._members.intersection(processes)))
        return found if self._process in found and len(found) > 1 else ()

    @contextlib.contextmanager
    def compiling(self, among: tuple[int, ...], key: str) -> Iterator[None]:
        """Records that this process compiles or loads a program in this context, or that it fails.

        Args:
          among: The processes that share it.
          key: Identity of the program.
        """
        self._known.add(key)
        if among[0] != self._process:
            yield
            return
        with self._change() as doing:
            doing.compiling.append(key)
        try:
            yield
        except BaseException as error:
            self.refuse(key, f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._change() as doing:
                doing.compiling.remove(key)
                doing.latest[str(among)] = key

    def give(self, key: str, executable: bytes) -> None:
        """Puts a serialized executable into the store."""
        with self._lock:
            self._kept[key] = len(executable)
            self._kept.move_to_end(key)
            total, old = sum(self._kept.values()), list[str]()
            while total > _MOST_KEPT_BYTES:
                oldest, size = self._kept.popitem(last=False)
                total -= size
                old.append(oldest)
        for oldest in old:
            self.refuse(oldest, "it is not kept any more")
        if key not in old:
            self._put(key, b"+" + executable)

    def refuse(self, key: str, why: str) -> None:
        """Tells the others that this process has no executable for them."""
        with contextlib.suppress(RuntimeError):  # the job has ended
            self._put(key, b"-" + why[:500].encode())

    def fetch(self, among: tuple[int, ...], key: str, is_over: Callable[[], bool]) -> bytes:
        """Waits for the executable of the first process.

        Args:
          among: The processes that share it.
          key: Identity of the program.
          is_over: Whether the job has failed or ended, so that the wait ends too.

        Returns:
          The serialized executable.

        Raises:
          NotSharedError: The first process has no executable to send, or did not send it within
            the time limit, or the job is over.
        """
        start = as_expected = time.monotonic()
        while not is_over():
            doing = self._doing_of(among[0])  # read before its executables
            poll_s = 0 if doing.has_left else _POLL_S
            if (packed := self._get(f"executable/{key}", poll_s)) is not None:
                if packed[:1] == b"-":
                    raise NotSharedError(packed[1:].decode())
                return packed[1:]
            if doing.has_left:
                raise NotSharedError("it has left the job")
            now, latest = time.monotonic(), doing.latest.get(str(among))
            if latest is None or latest in self._known or doing.compiling:
                as_expected = now
            if now - as_expected > _GRACE_S:
                raise NotSharedError("it has compiled another one in its place")
            if now - start > self._timeout_s:
                raise NotSharedError(
                    f"it has not come within {self._timeout_s:g} s (twice JAXHET_DEADLINE_S)"
                )
        raise NotSharedError("the job is over")

    def leave(self) -> None:
        """Tells the others that this process compiles nothing any more."""
        with self._change() as doing:
            doing.has_left = True

    @contextlib.contextmanager
    def _change(self) -> Iterator[_Doing]:
        """Publishes changes that are made inside the context."""
        with self._lock:
            yield self._doing
            text = json.dumps(dataclasses.asdict(self._doing)).encode()
            with contextlib.suppress(RuntimeError):  # the job has ended
                self._store.key_value_set_bytes(f"jaxhet/compiling/{self._process}", text, True)

    def _doing_of(self, process: int) -> _Doing:
        packed = self._get(f"compiling/{process}", 0)
        return _Doing() if packed is None else _Doing(**json.loads(packed))

    def _put(self, key: str, content: bytes) -> None:
        self._store.key_value_set_bytes(f"jaxhet/executable/{key}", content, True)

    def _get(self, name: str, timeout_s: float) -> bytes | None:
        try:
            if timeout_s:
                ms = round(timeout_s * 1000)
                return self._store.blocking_key_value_get_bytes(f"jaxhet/{name}", ms)
            return self._store.key_value_try_get_bytes(f"jaxhet/{name}")
        except RuntimeError as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise NotSharedError(str(error)) from error
