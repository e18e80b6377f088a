"""Executables that processes with equal GPUs get from the first of them that runs a program.

XLA measures candidates for its kernels when it compiles, and two measurements may end in two
choices: sums that should be equal on all replicas then differ in their last bits. So the processes
of a *tuning class* (equal devices, versions and flags) run one executable. The first process of the
class that takes part in a program compiles it; the others ask for its executable, and load it:

    other → first   {"to": [first], "from": other, "among": [process, …], "number": n, "key": key}
    first → others  {"to": [other, …], "key": key, "part": i, "of": n, "bytes": base64}
                    {"to": [other, …], "key": key, "error": text}

The bytes are a digest of all that follows, a text that says what its process needs to know to run
it, and the executable.
*key* is a digest of the module that JAX hands to XLA, and of XLA's options for it. *among* are the
processes of the class that run the program. *number* is how many programs of these processes the
asking process already has. If the first process has had another program at that number for a while,
it says so, and the asking process compiles its own program. Messages pass through the job's
coordinator.
"""

import base64
import collections
import contextlib
import dataclasses
import functools
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_DIGEST_BYTES = 16
_PART_BYTES = 4 << 20  # a message takes at most 16 MiB
_MOST_KEPT_BYTES = 512 << 20  # executables that others can ask for: the latest ones
_GRACE_S = 20.0  # threads of a process may compile programs in another order than elsewhere


class NotSharedError(Exception):
    """A process could not get an executable from another one, for the reason in the text."""


@dataclasses.dataclass(frozen=True)
class _Question:
    among: tuple[int, ...]
    number: int
    others: set[int] = dataclasses.field(default_factory=set)


class SharedPrograms:
    """Exchanges executables with the other processes of a tuning class."""

    def __init__(
        self,
        members: Sequence[int],
        process: int,
        tell: Callable[[dict[str, Any]], None],
        describe: Callable[[str], str],
        timeout_s: float,
    ):
        """Shares with the other processes of a class.

        Args:
          members: The processes of the class.
          process: This process.
          tell: Sends a message to the processes that it names. Any thread may call it.
          describe: Gets the name of a program of this process; returns the text that goes with the
            executable. Any thread may call it.
          timeout_s: Longest wait for an executable.
        """
        self._members = frozenset(members)
        self._process = process
        self._tell = tell
        self._describe = describe
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        # For each group of processes: keys of the programs that this process has, and since when.
        self._had: dict[tuple[int, ...], dict[str, float]] = {}
        # By key: what this process sends of its executables, oldest first.
        self._kept: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._failed: dict[str, str] = {}  # by key: why this process has no executable to send
        self._begun: set[str] = set()  # keys of programs that this process compiles
        self._asked: dict[str, _Question] = {}  # by key
        # By key of a program that this process fetches: threads that wait, parts, the answer.
        self._waiting: collections.Counter[str] = collections.Counter()
        self._parts: dict[str, dict[int, bytes]] = {}
        self._answers: dict[str, tuple[str, bytes] | NotSharedError] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        if len(self._members) > 1:
            threading.Thread(
                target=self._run_work, name="jaxhet-shared-programs", daemon=True
            ).start()

    def among(self, processes: Collection[int]) -> tuple[int, ...]:
        """The processes that share a program; the first of them compiles it.

        Args:
          processes: The processes whose devices run the program.

        Returns:
          Processes of this process's class; none if it shares the program with nobody.
        """
        found = tuple(sorted(self._members.intersection(processes)))
        return found if self._process in found and len(found) > 1 else ()

    def begin(self, key: str) -> None:
        """Takes note that this process compiles a program, for which others may wait."""
        with self._changed:
            self._begun.add(key)

    def add(self, among: tuple[int, ...], key: str, executable: bytes | None, program: str) -> None:
        """Takes note of a program of this process, which others may ask for now or later.

        Args:
          among: The processes that share it.
          key: Identity of the program.
          executable: The serialized executable; None if nobody will ask this process for it.
          program: The name by which `describe` knows it.
        """

        def keep() -> None:
            assert executable is not None
            self._keep(key, _pack(self._describe(program), executable))
            self._note(among, key)

        if executable is None:
            self._note(among, key)
        else:
            self._work.put(keep)

    def add_failure(self, among: tuple[int, ...], key: str, why: str) -> None:
        """Takes note that this process could not compile a program."""
        with self._changed:
            self._failed[key] = why
        self._note(among, key)

    def fetch(
        self, among: tuple[int, ...], key: str, is_over: Callable[[], bool]
    ) -> tuple[str, bytes]:
        """Waits for the executable of the first process.

        Args:
          among: The processes that share it.
          key: Identity of the program.
          is_over: Whether the job has failed or ended, so that the wait ends too.

        Returns:
          The text that the first process's `describe` gave, and the serialized executable.

        Raises:
          NotSharedError: The first process has no executable to send, or did not send it within
            the time limit, or the job is over.
        """
        with self._changed:
            self._waiting[key] += 1  # threads of this process may want the same program
            self._parts.setdefault(key, {})
            keys = [*self._had.get(among, ())]
            number = keys.index(key) if key in keys else len(keys)
        question = {"from": self._process, "among": among, "number": number, "key": key}
        self._tell({"to": [among[0]], **question})
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while key not in self._answers and time.monotonic() < deadline and not is_over():
                self._changed.wait(0.2)
            answer = self._answers.get(key)
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._parts[key]
                self._answers.pop(key, None)
        if isinstance(answer, NotSharedError):
            raise answer
        if answer is not None:
            return answer
        if is_over():
            raise NotSharedError("the job is over")
        raise NotSharedError(
            f"it has not come within {self._timeout_s:g} s (JAXHET_TUNING_TIMEOUT_S)"
        )

    def hear(self, message: Mapping[str, Any]) -> None:
        """Takes a message of another process: a question, a part of an answer, or a refusal."""
        key = str(message["key"])
        if "among" in message:
            among = tuple(int(process) for process in message["among"])
            other, number = int(message["from"]), int(message["number"])
            if other not in self._members or number < 0:
                raise ValueError(f"process {other} asks for program {number}")
            with self._changed:
                self._asked.setdefault(key, _Question(among, number)).others.add(other)
            self._serve()
            return
        with self._changed:
            if (parts := self._parts.get(key)) is None:
                return  # nobody waits for it
            if "error" in message:
                self._answers[key] = NotSharedError(str(message["error"]))
            else:
                try:
                    count = int(message["of"])
                    parts[int(message["part"])] = base64.b64decode(message["bytes"])
                    if len(parts) < count:
                        return
                    self._answers[key] = _unpack(b"".join(parts[i] for i in range(count)))
                except (KeyError, TypeError, ValueError):
                    self._answers[key] = NotSharedError("the executable arrived damaged")
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread that sends, after what it is doing."""
        self._work.put(None)

    def _run_work(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                if (work := self._work.get(timeout=1)) is None:
                    return
                work()
            self._serve()

    def _keep(self, key: str, content: bytes) -> None:
        with self._changed:
            self._failed.pop(key, None)
            self._kept[key] = content
            self._kept.move_to_end(key)
            while sum(map(len, self._kept.values())) > _MOST_KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._failed[oldest] = "it is not kept any more"

    def _note(self, among: tuple[int, ...], key: str) -> None:
        with self._changed:
            self._begun.discard(key)
            self._had.setdefault(among, {}).setdefault(key, time.monotonic())
        self._serve()

    def _serve(self) -> None:
        """Answers all questions that can be answered."""
        with self._changed:
            for key, question in list(self._asked.items()):
                had = self._had.get(question.among, {})
                if key in had or (key not in self._begun and self._is_another(question, had)):
                    del self._asked[key]
                    self._work.put(functools.partial(self._answer, key, sorted(question.others)))

    def _is_another(self, question: _Question, had: Mapping[str, float]) -> bool:
        """Whether this process has had another program in its place for a while."""
        if len(had) <= question.number:
            return False
        return time.monotonic() - [*had.values()][question.number] > _GRACE_S

    def _answer(self, key: str, others: list[int]) -> None:
        with self._changed:
            content = self._kept.get(key)
            error = self._failed.get(key, "it has compiled another one in its place")
        if content is None:
            self._tell({"to": others, "key": key, "error": error})
            return
        starts = range(0, len(content), _PART_BYTES)
        for i, start in enumerate(starts):
            part = base64.b64encode(content[start : start + _PART_BYTES]).decode()
            self._tell({"to": others, "key": key, "part": i, "of": len(starts), "bytes": part})


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _pack(text: str, executable: bytes) -> bytes:
    head = text.encode()
    content = len(head).to_bytes(8, "little") + head + executable
    return _digest(content) + content


def _unpack(packed: bytes) -> tuple[str, bytes]:
    content = packed[_DIGEST_BYTES:]
    if _digest(content) != packed[:_DIGEST_BYTES]:
        raise ValueError("the digest differs")
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end].decode(), content[end:]
