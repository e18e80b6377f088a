"""The session: everything that lives between `initialize` and `shutdown`."""

import collections
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import os
import queue
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxhet import _compilation, _errors, _ffi, _islands
from jaxhet._config import Config
from jaxhet._errors import DeadlineError, JaxhetError, UsageError
from jaxhet._islands import Island
from jaxhet._jax import compat, multihost
from jaxhet._job.membership import Membership
from jaxhet._launch import told
from jaxhet._log import LOGGER
from jaxhet._saves import Saves

_NOTICE_S = 1.0  # time for a program to notice a failure by its own exchanges
_TELL_S = 0.5  # time from a failure to its line in the log, unless the program notices it
_LOOK_S = 0.05
_DEVICES_S = 5.0  # for the devices to end their work after a failure
_FLUSH_S = 5.0  # to write what the files of a program hold
_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_NOT_FINALIZED = (
    "jaxhet: Python did not end within {:g} s after the exit hooks of this program: it waits for a"
    " device or a thread that may never end, because the job has failed. The process is ended now"
    f" with exit code {_EXIT_CODE} (JAXHET_EXIT_TIMEOUT_S)"
)
_ERROR_PATTERN = re.compile(r"jaxhet\.(\w+Error): (.*?)(?:\n-{10,}|\Z)", re.DOTALL)


def _open_files() -> list[io.IOBase]:
    """Python's open files. The list of all objects must not outlive the call: it keeps them."""
    return [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a session that its set-up has opened.

    Attributes:
      membership: Connection to the coordinator; None in tests and in a pretended job.
      relay: Relay between JAX's client and the coordination service.
      settings_differences: Differences between the islands' settings, a line for each.
      wait_for_devices: Waits for the GPUs of this process; None on CPUs.
      compilation: Parts of the session's `compilation`.
    """

    membership: Membership | None = None
    relay: _ffi.Relay | None = None
    settings_differences: tuple[str, ...] = ()
    wait_for_devices: Callable[[float], bool] | None = None
    compilation: _compilation.Parts = _compilation.NO_PARTS


_NO_PARTS = Parts()


class Observer:
    """Receiver of the events at the end of a session."""

    def failed(self) -> None:
        """The job has failed. Must not block."""

    def close(self) -> None:
        """The process leaves the job. The engine is still open."""

    def close_in_child(self) -> None:
        """This process is a fork of the one that joined the job."""


class Session:
    """One job as this process sees it. `engine` is None in a job of one island.

    A pretended job has no engine either: programs are only compiled for it.
    """

    def __init__(
        self,
        config: Config,
        process: int,
        islands: tuple[Island, ...] = (),
        engine: _ffi.Engine | None = None,
        parts: Parts = _NO_PARTS,
        is_pretended: bool = False,
    ):
        self.config = config
        self.process = process
        self.islands = islands
        self.engine = engine
        self.is_pretended = is_pretended
        self.settings_differences = parts.settings_differences
        self.unlike: tuple[str, ...] | None = None  # result of `unlike_islands`
        self.saves = Saves()
        self._observers: list[Observer] = []
        self._wait_for_devices = parts.wait_for_devices
        self._relay = parts.relay
        self._connector = parts.compilation.connector
        self._membership = parts.membership
        self._pid = os.getpid()
        self._acknowledged = threading.Event()
        self._closed = threading.Event()
        self._files = queue.SimpleQueue[list[io.IOBase]]()  # to flush, once
        self._has_left = False  # all connections are closed
        # Counts of meetings, by name.
        self._meetings = collections.defaultdict[str, Iterator[int]](itertools.count)
        self._is_idle = True  # at the end of the job: no device of this process is at work
        this = weakref.ref(self)  # XLA's hooks keep the compilation, which must not keep devices
        self.compilation = _compilation.Compilation(
            config,
            process,
            islands,
            engine,
            lambda: (session := this()) is None or session._is_over(),
            parts.compilation,
        )
        self._watcher = threading.Thread(target=self._watch, name="jaxhet-watch", daemon=True)
        # A pipe may be full, and Python starts no thread while it ends.
        self._flusher = threading.Thread(target=self._flush, name="jaxhet-flush", daemon=True)
        if engine is not None or parts.membership is not None:
            self._watcher.start()
            self._flusher.start()

    @functools.cached_property
    def island(self) -> Island:
        """The island of this process."""
        return _islands.of_process(self.islands, self.process)

    def observe(self, observer: Observer) -> None:
        """Registers an observer of the job's failure and end."""
        self._observers.append(observer)

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the coordinator."""
        assert self._membership is not None
        return self._membership.local_address

    @property
    def job(self) -> bytes:
        """The id of the job, equal in all processes."""
        assert self._membership is not None
        return self._membership.job

    # --- failure ---

    def _is_over(self) -> bool:
        """Whether the job has failed or ended."""
        return self.error() is not None or self._closed.is_set()

    def check_alive(self) -> None:
        """Raises if this process is a fork of the one that joined the job."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from one that joined the job and can't use its"
                " connections; start workers before jaxhet.initialize, or with the 'spawn' method"
            )

    def error(self) -> JaxhetError | None:
        """The first failure of the job, or None. In a job of one island: the coordinator's."""
        if self.engine is not None:
            return self.engine.error()
        return self._membership.loss if self._membership else None

    def acknowledge(self) -> None:
        """Records that the program knows of the failure: the watch does not end it any more."""
        self._acknowledged.set()

    def raise_if_failed(self) -> None:
        """Raises the job's first failure, if there is one."""
        self.check_alive()
        if error := self.error():
            self.acknowledge()
            raise error

    def raise_if_poisoned(self) -> None:
        """On GPUs, raises the job's first failure in place of the NaNs that it leaves in results.

        On CPUs a failed exchange is an error of JAX's.
        """
        if self.engine is not None and self.island.platform != "cpu":
            self.raise_if_failed()

    def translate(self, error: BaseException) -> JaxhetError | None:
        """The error of jaxhet inside an error of JAX, or None."""
        try:
            match = _ERROR_PATTERN.search(str(error))
        except Exception:  # __str__ of the program's class fails
            return None
        if match is None or match[1] not in _errors.BY_NAME:
            return None
        self.acknowledge()
        return _errors.BY_NAME[match[1]](match[2].strip())

    def _watch(self) -> None:
        """Passes failures from the coordinator to the engine, and then ends the program's waits."""
        failed = self._wait_for_failure()
        failed_at = time.monotonic()
        if failed is None:
            return
        if self.config.launched:
            told.tell()
        compat.let_sigterm_end_the_process()
        if self._connector is not None and self._membership is not None:
            self._membership.report(_ffi.as_ours(failed[1]))
        for observer in self._observers:
            observer.failed()
        self._tell(failed[1])
        if self._waits_for_saves(_NOTICE_S, failed_at, self._closed.is_set):
            return
        compat.cancel_barriers()
        limit_s = self.config.exit_after_failure_s
        if limit_s and not self._waits_for_saves(limit_s, failed_at, self._is_noticed):
            failed_for_s = time.monotonic() - failed_at
            lines = (
                f"this process did not end within {failed_for_s:.0f} s after {failed[1]}",
                *self.saves.losses(failed_for_s, limit_s),
                "it is ended now (JAXHET_EXIT_TIMEOUT_S)",
            )
            LOGGER.critical("%s", "\n".join(lines))
            self._wait_for_files()
            os._exit(_EXIT_CODE)

    def _flush(self) -> None:
        for file in self._files.get():
            with contextlib.suppress(Exception):  # it is closed, or its disk is full
                file.flush()

    def _wait_for_files(self) -> None:
        """Flushes open files, for a limited time: the process may end without closing them."""
        if not self._closed.is_set():  # else `discard` has given them
            self._files.put(_open_files())
        self._flusher.join(_FLUSH_S)

    def _tell(self, failure: str) -> None:
        """Logs a failure that the program does not notice at once: it compiles, saves, computes.

        Python can't raise an error in a thread that runs C++.
        """
        deadline = time.monotonic() + _TELL_S
        while time.monotonic() < deadline:
            if self._is_noticed():
                return
            time.sleep(_LOOK_S)
        LOGGER.error(
            "the job has failed: %s\n"
            "this process goes on with what it does now, a compilation or a save for example; its"
            " next call of jaxhet raises the error",
            failure,
        )

    def _wait_for_failure(self) -> tuple[str, str] | None:
        """The class and the text of the job's failure; None: the job has ended."""
        while not self._closed.is_set():
            if self.engine is None:
                if error := self.error():
                    return type(error).__name__, f"jaxhet.{type(error).__name__}: {error}"
                self._closed.wait(0.2)
                continue
            if self._membership and (cause := self._membership.failure):
                self.engine.fail(type(cause).__name__, str(cause))
            if not threading.main_thread().is_alive() and not self.compilation.has_launcher():
                self._report(_uncaught())  # exit hooks wait for other threads, a save for example
            failed = self.engine.wait_failure(200)
            if failed is not None:
                return failed
        return None

    def _is_noticed(self) -> bool:
        """Whether the program knows of the failure, or has begun to end: its exit hooks may run."""
        is_exiting = not threading.main_thread().is_alive()
        return self._closed.is_set() or self._acknowledged.is_set() or is_exiting

    def _waits_for_saves(
        self, timeout_s: float, failed_at: float, is_over: Callable[[], bool]
    ) -> bool:
        """Whether `is_over` becomes true before no save has made progress for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            if is_over():
                return True
            time.sleep(_LOOK_S)
            if self.saves.have_progressed(now - failed_at):
                deadline = now + timeout_s
        return False

    # --- end ---

    def close(self, timeout_s: float) -> None:
        """Waits for work in flight and says goodbye. Waits for the goodbyes of the other processes.

        Leaves no thread or socket behind, except the relay's on GPUs.
        """
        if os.getpid() != self._pid or self._closed.is_set():
            return
        uncaught = _uncaught()
        if self.engine is not None:
            self._report(uncaught)
            self.compilation.leave()
            self._is_idle = self._wait_until_idle(_DEVICES_S if self.error() else timeout_s)
        self._closed.set()
        for observer in self._observers:
            observer.close()
        if self._connector is not None:
            self._connector.close()
        if self.engine is not None:
            self.engine.close(0 if self.error() else round(timeout_s * 1000))
        if self._connector is not None and self._membership is not None and not self.error():
            self._membership.wait_for_all_to_leave(timeout_s)
        self.discard()
        if self._membership is not None:
            self._membership.leave()
        self._has_left = True
        if self.error() is not None:
            _failed.append(self)
        self._fail_exit(uncaught)

    def discard(self) -> None:
        """Ends the threads and connections of the session, except engine and membership."""
        self._closed.set()
        self._files.put([] if self.error() is None else _open_files())
        if self._watcher.is_alive():
            self._watcher.join()
        with contextlib.suppress(Exception):
            compat.disconnect_client()
        # XLA's client for GPUs keeps a request to the service open until the process ends. Without
        # the relay it would log an error each second.
        if self._relay is not None and self._wait_for_devices is None:
            self._relay.close()

    def meet(self, name: str) -> bool:
        """Waits for this process's devices, and until all processes have made the same call.

        Calls of one name are counted. Returns False, and does not wait, if the job has ended or if
        this thread launches exchanges.

        Raises:
          DeadlineError: A process has not come in time.
        """
        if self._has_left or self._membership is None or self.compilation.is_launcher():
            return False
        number, limit_s = next(self._meetings[name]), self.config.first_deadline_s
        self._wait_until_idle(limit_s)
        missing = multihost.missing_at(
            f"{name}/{number}", self.process, jax.process_count(), limit_s, self.raise_if_failed
        )
        if missing:
            raise DeadlineError(
                f"[process {self.process}] process {missing} has not called"
                f" sync_global_devices({name!r}) as often as this process ({number + 1}) within"
                f" {limit_s:g} s (six deadlines). It went another way in its program, is stopped,"
                " or is slower; if it is slower, raise JAXHET_DEADLINE_S"
            )
        if self.process == 0 and number:
            multihost.forget(f"{name}/{number - 1}")
        return True

    def _wait_until_idle(self, timeout_s: float) -> bool:
        """Waits for the devices of this process; returns whether they are idle."""
        if self._wait_for_devices is not None:
            return self._wait_for_devices(timeout_s)
        if not self.error():  # JAX does the same at exit
            with contextlib.suppress(RuntimeError, ValueError):  # a program has failed
                jax.effects_barrier()
        return compat.wait_for_arrays(timeout_s)

    def close_at_exit(self, timeout_s: float) -> None:
        """`close` at interpreter exit.

        The program's other exit hooks are not limited. After a failure of the job a device may
        never end its work. JAX does not wait for it then, and the end of the interpreter, after all
        exit hooks, has a limit.
        """
        if os.getpid() != self._pid:
            return
        self.close(timeout_s)
        if self.error() is None:
            return
        if self._is_idle:
            compat.forget_failed_callbacks()
        else:
            compat.skip_exit_waits()
        if limit_s := self.config.exit_after_failure_s:
            self._wait_for_files()
            _ffi.limit_finalization(limit_s, _NOT_FINALIZED.format(limit_s), _EXIT_CODE)

    def _report(self, uncaught: BaseException | None) -> None:
        """Reports the exception that ends the program to the other processes."""
        if uncaught is None or self.engine is None or self.error() is not None:
            return
        cause = self.translate(uncaught) or uncaught
        what = traceback.format_exception_only(cause)[0].strip()
        # XLA adds the frames of Python code that it has called.
        head, _, frames = what.partition("Traceback (most recent call last):")
        what = head + frames.strip().rpartition("\n")[2]
        where = self.island.name
        self.engine.fail(
            "PeerError",
            f"process {self.process} ({where}) ended by an exception: {what}; see there",
        )

    def _fail_exit(self, uncaught: BaseException | None) -> None:
        """Makes a program that does not know of the job's failure exit with an error code."""
        error = self.error()
        if error is None or uncaught is not None or self._acknowledged.is_set():
            return
        _ffi.fail_exit(_EXIT_CODE)
        LOGGER.critical(
            "this program leaves its job as if that had not failed: %s\n"
            "its exit code is %d, not 0. Results that arrived after the failure are not right, and"
            " integers and booleans on GPUs do not look wrong. jaxhet.block_until_ready(results)"
            " raises the error, jaxhet.last_error() returns it",
            error,
            _EXIT_CODE,
        )

    def abandon_in_child(self) -> None:
        """After a fork: the child gives up its copies of the connections, if it has any."""
        if self._has_left:
            return
        compat.skip_exit_waits()
        compat.abandon_client_in_child()
        for observer in self._observers:
            observer.close_in_child()
        if self.engine is not None:
            self.engine.abandon_in_child()
        if self._connector is not None:
            self._connector.close_in_child()
        if self._membership is not None:
            self._membership.close_in_child()


def _uncaught() -> BaseException | None:
    """The exception that ends the program, if there is one; `sys.exit(0)` does not count."""
    error = sys.exception() or getattr(sys, "last_exc", None)
    is_success = isinstance(error, SystemExit) and not error.code
    return None if is_success else error


_failed: list[Session] = []  # kept: their devices may be at work when the process exits
used = threading.Event()  # this process is or was in a job, or has tried to join one
_current: list[Session] = []


def current() -> Session | None:
    """The process's session, or None before `initialize` and after `shutdown`."""
    return _current[0] if _current else None


def required() -> Session:
    """The process's session.

    Raises:
      UsageError: there is none.
    """
    if not _current:
        raise UsageError("call jaxhet.initialize() first")
    return _current[0]


def install(session: Session) -> None:
    """Makes `session` the session of this process."""
    _current[:] = [session]


def remove() -> Session | None:
    """Ends the use of the process's session and returns it."""
    session = current()
    _current.clear()
    return session


def stats() -> dict[str, Any]:
    """Counters of this process's exchanges since `initialize`; empty in a job of one island.

    Returns:
      `exchanges_started`, `exchanges_completed`; `exchange_seconds`, the sum over exchanges of the
      time from start to completion; and for each transport in use, `local` included,
      `bytes_sent_<transport>` and `bytes_received_<transport>`; on GPUs `bytes_zero_copy_sent`, the
      part of the sent bytes that the receiver's GPU read out of the operand, and
      `bytes_zero_copy_received`, the part of the received bytes that this process's GPUs read out
      of the sender's operand. The time of an exchange between GPUs starts when its
      GPU reaches it, and is sampled every 5 ms: shorter ones may count 0.

    Raises:
      UsageError: `jaxhet.initialize` was not called.

    Examples:
      >>> before = jaxhet.stats()
      >>> value = jaxhet.block_until_ready(mean(x))
      >>> print(jaxhet.stats()["exchanges_completed"] - before["exchanges_completed"])
    """
    session = required()
    if session.engine is None:
        return {}
    counters = session.engine.stats()
    return {"exchange_seconds": counters.pop("in_flight_us") / 1e6, **counters}


def launch_from_this_thread() -> None:
    """Makes the calling thread the one that calls programs with exchanges over islands.

    Until then it is the thread that called `jaxhet.initialize`. A call of such a program by any
    other thread is a `UsageError`: the order of two threads' calls may differ between islands, and
    their data would be swapped. Call this at the same point of the program in all processes, when
    the former thread has ended its calls. Programs are compiled anew for the new thread.

    Raises:
      UsageError: `jaxhet.initialize` was not called.
    """
    session = required()
    if session.engine is not None:
        session.compilation.own_launches()


def islands() -> tuple[Island, ...]:
    """The job's islands.

    Raises:
      UsageError: `jaxhet.initialize` was not called.

    Examples:
      >>> for island in jaxhet.islands():
      ...     print(island.name, island.platform, island.ranks)
    """
    return required().islands
