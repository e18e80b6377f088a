"""The session: everything that lives between `initialize` and `shutdown`."""

import contextlib
import contextvars
import dataclasses
import faulthandler
import functools
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Literal, cast

from jaxhet import _errors, _ffi, compiler
from jaxhet._config import Config
from jaxhet._errors import JaxhetError, UsageError
from jaxhet._gpu.tuning import Tuning
from jaxhet._islands import Island
from jaxhet._jax import compat, programs
from jaxhet._job.connector import Connector
from jaxhet._job.membership import Membership
from jaxhet._log import LOGGER
from jaxhet._saves import Saves
from jaxhet._telemetry.events import Events
from jaxhet._telemetry.metrics import Metrics
from jaxhet._telemetry.trace import Trace
from jaxhet._traced import jaxprs
from jaxhet.compiler import exchange

_NOTICE_S = 1.0  # for a program to hear of a failure from its own exchanges
_EXIT_GRACE_S = 5.0
_CALLS = (exchange.EXCHANGE_TARGET, *exchange.DEVICE_TARGETS)
_MOST_LISTING_BYTES = 256 * 1024  # largest listing that peers get for their errors
_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_ERROR_PATTERN = re.compile(r"jaxhet\.(\w+Error): (.*?)(?:\n-{10,}|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class BridgeOptions:
    """Options of one function's exchanges.

    Attributes:
      deadline_s: longest wait of an exchange for a peer, in seconds; None: the job's `deadline_s`.
    """

    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"bridge deadline_s={self.deadline_s!r} must be above 0 seconds")


_DEFAULT_OPTIONS = BridgeOptions()
_bridge_options: contextvars.ContextVar[BridgeOptions] = contextvars.ContextVar(
    "jaxhet_bridge_options", default=_DEFAULT_OPTIONS
)


@contextlib.contextmanager
def bridge_options(options: BridgeOptions) -> Iterator[None]:
    """Compiles what is compiled inside with `options`."""
    token = _bridge_options.set(options)
    try:
        yield
    finally:
        _bridge_options.reset(token)


def compiler_options(config: Config) -> compiler.Options:
    """The options of the passes."""
    return compiler.Options(
        algorithm=config.algorithm,
        two_shot_bytes=config.two_shot_bytes,
        bucket_bytes=config.bucket_bytes,
        pipeline_iterations=config.pipeline_iterations,
    )


class Session:
    """One job as this process sees it. `engine` is None in a job of one island.

    A pretended job is there for programs to be compiled for; it has no engine either.
    """

    def __init__(
        self,
        config: Config,
        process: int,
        islands: tuple[Island, ...] = (),
        engine: _ffi.Engine | None = None,
        membership: Membership | None = None,
        is_pretended: bool = False,
    ):
        self.config = config
        self.process = process
        self.islands = islands
        self.engine = engine
        self.is_pretended = is_pretended
        self.connector: Connector | None = None  # unless all processes are connected
        self.plans: dict[int, compiler.Plan] = {}
        self.programs: dict[str, jaxprs.Program] = {}  # by digest
        self.tuning: Tuning | None = None
        self.settings_differences: tuple[str, ...] = ()  # between islands, a line for each
        self.unlike: tuple[str, ...] | None = None  # result of `unlike_islands`
        self.replicas_checked = 0  # arrays whose replicas were compared
        self.replicas_differing = 0  # compared arrays whose replicas differed
        self.metrics: Metrics | None = None
        self.trace: Trace | None = None
        self.saves = Saves()
        self._bridged: set[str] = set()  # digests of programs with exchanges
        self._launcher: threading.Thread | None = None
        self._launchers = itertools.count(1)
        self._membership = membership
        self._pid = os.getpid()
        self._acknowledged = threading.Event()
        self._closed = threading.Event()
        self._has_left = False  # all connections are closed
        self._dump_number = itertools.count()
        self._watcher = threading.Thread(target=self._watch, name="jaxhet-watch", daemon=True)
        if engine is not None:
            self._watcher.start()

    @functools.cached_property
    def island(self) -> Island:
        """This process's own."""
        return next(island for island in self.islands if self.process in island.processes)

    @functools.cached_property
    def events(self) -> Events:
        """Recorder of this process's events."""
        return Events(self.process, self.island.name)

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

    # --- compiler hooks ---

    def describe(self, *program: Any) -> str:
        """The digest of a program that JAX lowers; its words are kept."""
        described = jaxprs.describe(*program)
        self.programs[described.digest] = described
        return described.digest

    def decompose(self, module: bytes) -> bytes | None:
        """The PRE hook."""
        if self.tuning is not None and (program := compiler.program_of(module)):
            self.tuning.before(program, lambda: self._is_over)
        with _named_errors():
            changed = compiler.decompose(module, self._job, self._options())
        if changed is not None:
            self._dump(module, "before")
        return changed

    def bridge(self, module: bytes) -> bytes | None:
        """The POST hook: makes the plan known before the program can start."""
        if self.tuning is not None and (program := compiler.program_of(module)):
            self.tuning.after(program)
        with _named_errors():
            result = compiler.bridge(module, self._job, self._options())
        if result is None:
            return None
        changed, plan = result
        assert self.engine is not None
        if self.connector is not None:
            with _named_errors():
                self.connector.need(self._peers_in(plan))
        program = self.programs.get(plan.program)
        listing = program.listing(_MOST_LISTING_BYTES) if program else ""
        self.engine.register_plan(plan.fingerprint, plan.text, listing)
        self.plans[plan.fingerprint] = plan
        self._bridged.add(plan.program)
        self._dump(changed, "after", plan)
        return changed

    def _peers_in(self, plan: compiler.Plan) -> set[int]:
        """The other processes with which this one exchanges in a program."""
        process_of = {
            rank: device.process_index
            for island in self.islands
            for rank, device in zip(island.ranks, island.devices, strict=True)
        }
        mine = {rank for rank, process in process_of.items() if process == self.process}
        groups = {group for entry in plan.exchanges for group in entry.parts.groups}
        met = (group for group in groups if not mine.isdisjoint(group))
        return {process_of[rank] for group in met for rank in group} - {self.process}

    @property
    def _is_over(self) -> bool:
        """Whether the job has failed."""
        return self.error() is not None or self._closed.is_set()

    # --- launches ---

    def is_bridged(self, program: str) -> bool:
        """Whether a program exchanges over islands, by its digest."""
        return program in self._bridged

    def own_launches(self) -> None:
        """Makes the calling thread the one that launches programs with exchanges."""
        self._launcher = threading.current_thread()
        programs.own_launches(next(self._launchers))

    def check_launch(self, name: str) -> None:
        """Checks that this thread launches programs with exchanges.

        Raises:
          UsageError: Another thread does.
        """
        thread, launcher = threading.current_thread(), self._launcher
        if thread is not launcher and launcher is not None:
            raise UsageError(
                f"{name} exchanges data over islands and was called by thread {thread.name!r};"
                f" in this process {launcher.name!r} calls such programs. Two threads may call them"
                " in another order than on another island, and data would be swapped. Call them"
                " all from one thread; jaxhet.launch_from_this_thread() makes it this one, and has"
                " to be called at the same point of the program in all processes"
            )

    # --- persistent compilation cache ---

    def cache_salt(self, device_ids: tuple[int, ...]) -> str:
        """The facts, unknown to JAX, that a program compiled now depends on."""
        island = self.island
        if {device.id for device in island.devices}.issuperset(device_ids):
            return repr((self._versions, self._cache_writer))  # the passes leave it alone
        job = dataclasses.replace(self._job, process=self._cache_writer)
        return repr((self._versions, job, self._options(), device_ids))

    def accept_cached(self, module: bytes) -> bool:
        """Makes the plan of a program that comes from the cache known before it can start.

        The compiled module holds the plan.

        Returns:
          Whether the program may be used.
        """
        if self.config.dump:  # which wants the module from before the passes
            return False
        try:
            has_plan = self.bridge(module) is not None
        except RuntimeError:
            return False
        return has_plan or not any(call.encode() in module for call in _CALLS)

    def accept_deserialized(self, module: bytes) -> bool:
        """Makes the plan of an executable that the program loads known, as `accept_cached` does.

        Returns:
          Whether it exchanges over islands.

        Raises:
          UsageError: It was compiled for another job, or by other passes.
        """
        try:
            if self.bridge(module) is not None:
                return True
        except RuntimeError as error:
            raise UsageError(f"can't load a serialized executable: {error}") from error
        if any(call.encode() in module for call in _CALLS):
            raise UsageError(
                "can't load a serialized executable: it exchanges data over islands and holds no"
                " plan; compile the function in this job"
            )
        return False

    @property
    def writes_cache(self) -> bool:
        """Whether this process writes entries."""
        return self.process == self._cache_writer

    @property
    def _cache_writer(self) -> int:
        """The process that writes what this one reads.

        The processes of an island share programs, but on CPU JAX's key differs in each of them.
        """
        island = self.island
        return self.process if island.platform == "cpu" else island.processes[0]

    @functools.cached_property
    def _versions(self) -> tuple[object, ...]:
        files = sorted(pathlib.Path(compiler.__file__).parent.glob("*.py"))
        passes = hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=16)
        jaxhet = importlib.metadata.version("jaxhet")
        return compat.versions(), jaxhet, passes.hexdigest()

    @functools.cached_property
    def _job(self) -> compiler.Job:
        island_of = {rank: island.index for island in self.islands for rank in island.ranks}
        devices = {
            rank: device
            for island in self.islands
            for rank, device in zip(island.ranks, island.devices, strict=True)
        }
        ranks = range(len(devices))
        return compiler.Job(
            device_ids=tuple(devices[r].id for r in ranks),
            islands=tuple(island_of[r] for r in ranks),
            platform=cast(Literal["cpu", "cuda", "rocm"], self.island.platform),
            process=self.process,
            session=self.engine.session if self.engine else 0,
        )

    def _options(self) -> compiler.Options:
        deadline_s = _bridge_options.get().deadline_s
        return dataclasses.replace(
            compiler_options(self.config),
            deadline_ms=0 if deadline_s is None else max(1, round(deadline_s * 1000)),
        )

    def _dump(self, module: bytes, when: str, plan: compiler.Plan | None = None) -> None:
        if not self.config.dump:
            return
        folder = pathlib.Path(self.config.dump)
        folder.mkdir(parents=True, exist_ok=True)
        text = compat.module_text(module)
        name = re.sub(r"\W", "_", text.split(",", 1)[0].removeprefix("HloModule "))
        stem = f"process{self.process}.{next(self._dump_number):04d}.{name}"
        (folder / f"{stem}.{when}.hlo.txt").write_text(text)
        if plan is not None:
            (folder / f"{stem}.plan.txt").write_text(plan.text)
            if (program := self.programs.get(plan.program)) is not None:
                (folder / f"{stem}.program.txt").write_text(program.listing())

    # --- failure ---

    def check_alive(self) -> None:
        """Raises if this process is a fork of the one that joined the job."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from one that joined the job and can't use its"
                " connections; start workers before jaxhet.initialize, or with the 'spawn' method"
            )

    def error(self) -> JaxhetError | None:
        """The first failure of the job, or None."""
        return self.engine.error() if self.engine else None

    def acknowledge(self) -> None:
        """The program knows of the failure: it is not ended by the watch any more."""
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
        """Our error inside one of JAX's, or None if it is not ours."""
        match = _ERROR_PATTERN.search(str(error))
        if match is None or match[1] not in _errors.BY_NAME:
            return None
        self.acknowledge()
        return _errors.BY_NAME[match[1]](match[2].strip())

    def _watch(self) -> None:
        """Carries failures from the coordinator to the engine, and frees who is stuck after one."""
        assert self.engine is not None
        failed = None
        while failed is None and not self._closed.is_set():
            if self._membership and (cause := self._membership.failure):
                self.engine.fail(type(cause).__name__, str(cause))
            failed = self.engine.wait_failure(200)
            with contextlib.suppress(RuntimeError, UsageError):  # the engine was closed meanwhile
                self.events.count_path_failures(self.engine.peer_stats())
        failed_at = time.monotonic()
        if failed is not None:
            self.events.failed(failed[0])
            if self.connector is not None and self._membership is not None:
                self._membership.report(_ffi.as_ours(failed[1]))
        if failed is not None and self.trace is not None:
            self.trace.write_in_background()
        if failed is None or self._is_noticed_within(_NOTICE_S, failed_at):
            return
        compat.cancel_barriers()
        limit_s = self.config.exit_after_failure_s
        if limit_s and not self._is_noticed_within(limit_s, failed_at):
            failed_for_s = time.monotonic() - failed_at
            lines = (
                f"this process did not end within {failed_for_s:.0f} s after {failed[1]}",
                *self.saves.losses(failed_for_s, limit_s),
                "it is ended now (JAXHET_EXIT_AFTER_FAILURE_S)",
            )
            LOGGER.critical("%s", "\n".join(lines))
            os._exit(_EXIT_CODE)

    def _is_noticed_within(self, timeout_s: float, failed_at: float) -> bool:
        """Whether the program learns of the failure in a time in which no save makes progress."""
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            if self._closed.is_set() or self._acknowledged.wait(0.05):
                return True
            if self.saves.have_progressed(now - failed_at):
                deadline = now + timeout_s
        return False

    # --- end ---

    def close(self, timeout_s: float) -> None:
        """Waits for what is under way, says goodbye to the other processes and waits for theirs.

        Leaves no thread or socket behind.
        """
        if os.getpid() != self._pid or self._closed.is_set():
            return
        uncaught = _uncaught()
        if self.engine is not None:
            self._report(uncaught)
            wait_s = _EXIT_GRACE_S if self.error() else timeout_s
            if self.island.platform != "cpu":
                compat.wait_for_devices(wait_s)
            elif not self.error():
                compat.wait_for_arrays(wait_s)
        self._closed.set()
        if self.metrics is not None:
            self.metrics.close()
        if self.trace is not None:
            self.trace.close()
        if self.connector is not None:
            self.connector.leave()
        if self.engine is not None:
            self.engine.close(0 if self.error() else round(timeout_s * 1000))
        if self.connector is not None and self._membership is not None:
            if not self.error():
                self._membership.wait_for_all_to_leave(timeout_s)
            self.connector.close()
        self.discard()
        if self._membership is not None:
            self._membership.leave()
        self._has_left = True
        self._fail_exit(uncaught)

    def discard(self) -> None:
        """Ends what is the session's own; engine and membership are left as they are."""
        self._closed.set()
        if self.tuning is not None:
            self.tuning.close()
        if self._watcher.is_alive():
            self._watcher.join()
        with contextlib.suppress(Exception):
            compat.disconnect_client()

    def close_at_exit(self, timeout_s: float) -> None:
        """`close` at interpreter exit, which must end although JAX waits for what can't end."""
        self.close(timeout_s)
        if self.error() is not None:
            faulthandler.dump_traceback_later(_EXIT_GRACE_S, exit=True)

    def _report(self, uncaught: BaseException | None) -> None:
        """A process that ends by an exception tells the others which."""
        if uncaught is None or self.engine is None or self.error() is not None:
            return
        cause = self.translate(uncaught) or uncaught
        what = traceback.format_exception_only(cause)[0].strip()
        where = self.island.name
        self.engine.fail(
            "PeerError",
            f"process {self.process} ({where}) ended by an exception: {what}; see there",
        )

    def _fail_exit(self, uncaught: BaseException | None) -> None:
        """A program that was not told of the job's failure does not end as if it had succeeded."""
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
        if self.metrics is not None:
            self.metrics.close_in_child()
        if self.engine is not None:
            self.engine.abandon_in_child()
        if self.connector is not None:
            self.connector.close_in_child()
        if self._membership is not None:
            self._membership.close_in_child()


def _uncaught() -> BaseException | None:
    """The exception by which the program ends, if it does; `sys.exit(0)` is none."""
    error = sys.exception() or getattr(sys, "last_exc", None)
    is_success = isinstance(error, SystemExit) and not error.code
    return None if is_success else error


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Puts the class into the text: of an error in a hook, JAX passes on the text only."""
    try:
        yield
    except JaxhetError as error:
        raise RuntimeError(f"jaxhet.{type(error).__name__}: {error}") from None


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
    """Makes `session` the process's own."""
    _current[:] = [session]


def remove() -> Session | None:
    """Takes the process's session out of use and returns it."""
    session = current()
    _current.clear()
    return session


def stats() -> dict[str, Any]:
    """Counters of this process's exchanges since `initialize`; empty in a job of one island.

    Returns:
      `exchanges_started`, `exchanges_completed`; `exchange_seconds`, the sum over exchanges of the
      time from start to completion; and for each transport in use, `local` included,
      `bytes_sent_<transport>` and `bytes_received_<transport>`; on GPUs `bytes_sent_in_place`, of
      those that the receiver's GPU or a NIC read where the operand lies, and `bytes_pulled`, of
      those that this process's GPUs read so. An exchange between GPUs counts from when its GPU
      comes to it, and is looked at every 5 ms: shorter ones may count 0.

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
        session.own_launches()


def islands() -> tuple[Island, ...]:
    """The job's islands.

    Raises:
      UsageError: `jaxhet.initialize` was not called.
    """
    return required().islands
