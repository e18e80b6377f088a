"""The programs of a job: how this process compiles them, and which thread launches them."""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import pathlib
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxhet import _ffi, _islands, compiler
from jaxhet._config import Config
from jaxhet._errors import JaxhetError, UsageError
from jaxhet._islands import Island
from jaxhet._jax import compat, compiler_settings, programs
from jaxhet._jax.shared_programs import SharedPrograms, Sharing
from jaxhet._job.connector import Connector
from jaxhet._log import LOGGER
from jaxhet._options import CODECS
from jaxhet._traced import jaxprs
from jaxhet._traced.words import Held, first_difference
from jaxhet.compiler import carrier

_CALLS = (carrier.EXCHANGE_TARGET, *carrier.DEVICE_TARGETS)
_MOST_LISTING_BYTES = 256 * 1024  # largest listing that peers get for their errors
_MOST_LOWERED = 256  # traced programs that are kept: the latest ones


class _Rank(NamedTuple):
    device_id: int
    process: int
    island: int


@dataclasses.dataclass(frozen=True)
class BridgeOptions:
    """Options of one function's exchanges.

    Attributes:
      deadline_s: longest wait of an exchange for a peer, in seconds; None: the job's `deadline_s`.
      wire: codec of floats between islands, instead of the option `wire`: a name for all exchanges
        that can have one, or a mapping of mesh axes to names; "": none. The codecs are bf16, mxfp8,
        mxint8 and mxint4.

    Both are a part of the program, and must be equal on all islands.
    """

    deadline_s: float | None = None
    wire: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"bridge deadline_s={self.deadline_s!r} must be above 0 seconds")
        for codec in self.codecs.values():
            if codec not in CODECS:
                names = ", ".join(CODECS)
                raise UsageError(f"bridge wire={self.wire!r} is not valid; codecs: {names}")

    @property
    def codecs(self) -> dict[str, str]:
        """Mesh axis to codec; the axis "" is any without an entry."""
        if isinstance(self.wire, str):
            return {"": self.wire} if self.wire else {}
        return dict(sorted((self.wire or {}).items()))


_DEFAULT_OPTIONS = BridgeOptions()
_bridge_options: contextvars.ContextVar[BridgeOptions] = contextvars.ContextVar(
    "jaxhet_bridge_options", default=_DEFAULT_OPTIONS
)


@contextlib.contextmanager
def bridge_options(options: BridgeOptions) -> Iterator[None]:
    """Context in which programs are compiled with `options`."""
    token = _bridge_options.set(options)
    try:
        yield
    finally:
        _bridge_options.reset(token)


def compiler_options(config: Config) -> compiler.Options:
    """The options of the passes."""
    return compiler.Options(
        algorithm=config.algorithm,
        pipeline_iterations=config.pipeline_iterations,
        one_world_kernels=bool(config.one_world_kernels),
        wire=tuple(
            sorted((axis, codec) for axis, _, codec in (w.rpartition("=") for w in config.wire))
        ),
    )


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts that a job with GPUs or with many processes has.

    Attributes:
      connector: Connects the processes that a program needs; None if all are connected.
      later: Pairs of a rank of this process and another one that only the connector joins; None:
        all pairs.
      shared: The executables of processes with equal GPUs; None if each compiles its own.
      over_islands: XLA's options for programs over several islands.
    """

    connector: Connector | None = None
    later: frozenset[tuple[int, int]] | None = None
    shared: SharedPrograms | None = None
    over_islands: Mapping[str, bool | int] = dataclasses.field(default_factory=dict)


NO_PARTS = Parts()


class Compilation:
    """The compiled programs of a job.

    Attributes:
      engine: The engine that gets to know the plans; None in a job that has none.
      parts: Parts that not every job has.
      plans: Fingerprint to plan.
      programs: Digest to the program as JAX traced it, of those that were lowered last.
    """

    def __init__(
        self,
        config: Config,
        process: int,
        islands: tuple[Island, ...],
        engine: _ffi.Engine | None,
        is_over: Callable[[], bool] = lambda: False,
        parts: Parts = NO_PARTS,
    ):
        """Keeps the programs of one process of a job.

        Args:
          config: The options.
          process: This process.
          islands: The islands of the job.
          engine: The engine of this process.
          is_over: Whether the job has failed or ended.
          parts: Parts that not every job has.
        """
        self.engine = engine
        self.parts = parts
        self.plans: dict[int, compiler.Plan] = {}
        self.programs: dict[str, jaxprs.Program] = {}
        self._config = config
        self._process = process
        # XLA's hooks keep this object as long as the process lives. A device would keep JAX's
        # client of the coordination service, for which gRPC waits 2 s when the process exits.
        self._islands = tuple(dataclasses.replace(island, devices=()) for island in islands)
        self._ranks = [
            _Rank(device.id, device.process_index, island.index)
            for island, device in _islands.by_rank(islands).values()
        ]
        self.is_over = is_over
        self._held: dict[str, tuple[Held, ...]] = {}  # by digest: what no word describes
        self._bridged: set[str] = set()  # digests of programs with exchanges
        self._lock = threading.Lock()
        self._launcher: threading.Thread | None = None
        self._launchers = itertools.count(1)
        self._dump_number = itertools.count()

    @functools.cached_property
    def _island(self) -> Island:
        return _islands.of_process(self._islands, self._process)

    # --- hooks of XLA ---

    def compiler_options(self, devices: frozenset[int]) -> Mapping[str, bool | int] | None:
        """XLA's options for a program on the devices with these ids; None inside an island."""
        return self.parts.over_islands if self._is_over_islands(devices) else None

    def _is_over_islands(self, devices: frozenset[int]) -> bool:
        return len({rank.island for rank in self._ranks if rank.device_id in devices}) > 1

    def describe(
        self, name: str, jaxpr: Any, arguments: Sequence[Any], location: Callable[[Any], str]
    ) -> str:
        """The digest of a program that JAX lowers. Keeps its listing, for plans and dumps.

        Raises:
          UsageError: Nothing tells the program from another one that this process has.
        """
        settings = compiler_settings.of_program()
        own = _bridge_options.get()
        if own.deadline_s is not None:  # the engine's plan has it
            settings |= {"jaxhet.jit(bridge=deadline_s)": str(own.deadline_s)}
        if own.wire is not None:
            settings |= {"jaxhet.jit(bridge=wire)": str(own.codecs)}
        described = jaxprs.describe(name, jaxpr, arguments, location, settings)
        with self._lock:
            if described.held:
                known = self._held.setdefault(described.digest, described.held)
                if (other := first_difference(known, described.held)) is not None:
                    raise UsageError(_not_told_apart(described.name, other))
            self.programs.pop(described.digest, None)
            self.programs[described.digest] = described
            if len(self.programs) > _MOST_LOWERED:
                del self.programs[next(iter(self.programs))]
        return described.digest

    def decompose(self, module: bytes) -> bytes | None:
        """Replaces the collectives of a module that cross islands, before XLA schedules it."""
        changed = compiler.decompose(module, self._job, self._options())
        if changed is not None:
            self._dump(module, "before")
        return changed

    def bridge(self, module: bytes) -> bytes | None:
        """Bridges the exchanges of a scheduled module, whose plan is known before it can start."""
        result = compiler.bridge(module, self._job)
        if result is None:
            return None
        changed, plan = result
        self._register(plan)
        self._dump(changed, "after", plan)
        return changed

    def _register(self, plan: compiler.Plan) -> None:
        """Makes a plan known before its program can start."""
        assert self.engine is not None
        if self.parts.connector is not None:
            self.parts.connector.need(self._peers_in(plan))
        program = self.programs.get(plan.program)
        listing = program.listing(_MOST_LISTING_BYTES) if program else ""
        self.engine.register_plan(plan.fingerprint, plan.text, plan.movements, listing)
        self.plans[plan.fingerprint] = plan
        self._bridged.add(plan.program)

    def _peers_in(self, plan: compiler.Plan) -> set[int]:
        """The other processes that the connector has to join to this one for a program."""
        process_of = {number: rank.process for number, rank in enumerate(self._ranks)}
        mine = {rank for rank, process in process_of.items() if process == self._process}
        groups = {group for spec in plan.exchanges for group in spec.groups}
        pairs = {pair for group in groups for pair in itertools.product(mine & {*group}, group)}
        if self.parts.later is not None:
            pairs &= self.parts.later
        return {process_of[rank] for _, rank in pairs} - {self._process}

    def is_described(self, program: str) -> bool:
        """Whether the digest describes all objects that a program holds."""
        return bool(program) and program not in self._held

    # --- callbacks ---

    def callback_failed(self, devices: frozenset[int], error: BaseException) -> None:
        """Fails the job if other islands wait for the result of a callback that has raised.

        Args:
          devices: Ids of the program's devices.
          error: The exception that the callback has raised.
        """
        if self.engine is None or not self._is_over_islands(devices):
            return
        what = traceback.format_exception_only(error)[0].splitlines()[0]
        self.engine.fail(
            "PeerError",
            f"process {self._process} ({self._island.name}): a host callback raised {what}; the"
            " other devices of its program wait for the result; see there",
        )

    # --- launches ---

    def is_bridged(self, program: str) -> bool:
        """Whether a program exchanges over islands, by its digest."""
        return program in self._bridged

    def own_launches(self) -> None:
        """Makes the calling thread the one that launches programs with exchanges."""
        self._launcher = threading.current_thread()
        programs.own_launches(next(self._launchers))

    def is_launcher(self) -> bool:
        """Whether the calling thread may launch programs with exchanges."""
        return self._launcher in (None, threading.current_thread())

    def has_launcher(self) -> bool:
        """Whether a thread that launches programs with exchanges has not ended."""
        return self._launcher is None or self._launcher.is_alive()

    def check_launch(self, name: str) -> None:
        """Checks that the calling thread may launch programs with exchanges.

        Raises:
          UsageError: Another thread launches them.
        """
        launcher = self._launcher
        if launcher is not None and not self.is_launcher():
            thread = threading.current_thread()
            raise UsageError(
                f"{name} exchanges data over islands and was called by thread {thread.name!r};"
                f" in this process {launcher.name!r} calls such programs. Two threads may call them"
                " in another order than on another island, and data would be swapped. Call them"
                " all from one thread; jaxhet.launch_from_this_thread() makes it this one, and has"
                " to be called at the same point of the program in all processes"
            )

    # --- persistent compilation cache ---

    def cache_salt(self, device_ids: tuple[int, ...]) -> str:
        """Facts that a program compiled now depends on, besides those in JAX's key."""
        islands = {rank.island for rank in self._ranks if rank.device_id in device_ids}
        if islands <= {self._island.index}:
            return repr((self._versions, self._cache_writer))  # the passes leave it alone
        return repr((self._versions, self._cache_writer, self._job, self._options(), device_ids))

    def accept_cached(self, module: bytes) -> bool:
        """Registers the plan of a program that JAX's cache holds, before the program can start.

        The compiled module holds the plan.

        Returns:
          Whether the program may be used.
        """
        # A dump needs the module as it was before the passes.
        return not self._config.dump and self.accept(module)

    def accept(self, module: bytes) -> bool:
        """Registers the plan of a compiled module; returns whether the program may be used."""
        try:
            self._adopt(module)
        except JaxhetError:
            return False
        return True

    def accept_deserialized(self, module: bytes) -> bool:
        """Registers the plan of an executable that the program loads, as `accept_cached` does.

        Returns:
          Whether it exchanges over islands.

        Raises:
          UsageError: It was compiled for another job, or by other passes.
        """
        try:
            return self._adopt(module)
        except JaxhetError as error:
            raise UsageError(f"can't load a serialized executable: {error}") from error

    def _adopt(self, module: bytes) -> bool:
        """Registers the plan of a compiled module; returns whether it exchanges over islands."""
        if self.bridge(module) is not None:
            return True
        if any(call.encode() in module for call in _CALLS):
            raise UsageError(
                "it exchanges data over islands and holds no plan; compile the function in this job"
            )
        return False

    # --- executables of other processes ---

    def share(self) -> None:
        """Lets JAX load executables of other processes."""
        if self.parts.shared is not None:
            assert self.engine is not None
            attribute, failure = compiler.PROGRAM_ATTRIBUTE, self.engine.error
            self.parts.shared.install(
                Sharing(attribute, self.is_described, self.accept, failure, self.is_over)
            )

    def leave(self) -> None:
        """Tells processes that wait for an executable of this one that none will come."""
        if self.parts.shared is not None and not self.is_over():
            self.parts.shared.leave()

    @property
    def writes_cache(self) -> bool:
        """Whether this process writes entries."""
        return self._process == self._cache_writer

    @property
    def _cache_writer(self) -> int:
        """The process that writes the cache entries that this one reads.

        The processes of an island share programs, but on CPU JAX's key differs in each of them.
        """
        island = self._island
        return self._process if island.platform == "cpu" else island.processes[0]

    @functools.cached_property
    def _versions(self) -> tuple[object, ...]:
        files = sorted(pathlib.Path(compiler.__file__).parent.glob("*.py"))
        passes = hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=16)
        jaxhet = importlib.metadata.version("jaxhet")
        return compat.versions(), jaxhet, passes.hexdigest()

    @functools.cached_property
    def _job(self) -> compiler.Job:
        return compiler.Job(
            device_ids=tuple(rank.device_id for rank in self._ranks),
            islands=tuple(rank.island for rank in self._ranks),
            platform=self._island.platform,
            session=self.engine.session if self.engine else 0,
            has_one_platform=len({island.platform for island in self._islands}) == 1,
        )

    def _options(self) -> compiler.Options:
        own, options = _bridge_options.get(), compiler_options(self._config)
        if own.deadline_s is not None:
            options = dataclasses.replace(options, deadline_ms=max(1, round(own.deadline_s * 1000)))
        if own.wire is not None:
            axes = tuple(filter(None, own.codecs))
            wire = tuple(own.codecs.items())
            options = dataclasses.replace(options, wire=wire, needed_axes=axes)
        return options

    def _dump(self, module: bytes, when: str, plan: compiler.Plan | None = None) -> None:
        """Writes what the user wants to read; a full disk ends no job."""
        if not self._config.dump:
            return
        text = compat.module_text(module)
        name = re.sub(r"\W", "_", text.split(",", 1)[0].removeprefix("HloModule "))
        stem = f"process{self._process}.{next(self._dump_number):04d}.{name}"
        texts = {f"{when}.hlo": text}
        if plan is not None:
            texts["plan"] = plan.text
            if (program := self.programs.get(plan.program)) is not None:
                texts["program"] = program.listing()
        folder = pathlib.Path(self._config.dump)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind, content in texts.items():
                file = folder / f"{stem}.{kind}.txt"
                file.write_text(content, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            LOGGER.warning(
                "process %d can't write program %s to %s: %s; make room there or choose another"
                " JAXHET_DUMP",
                self._process,
                name,
                folder,
                error.strerror,
            )


def _not_told_apart(name: str, other: Held) -> str:
    return (
        f"this process has two programs {name} that differ in nothing but an object of {other.what}"
        f" ({other.place}), which jaxhet can't compare between processes: islands that call the two"
        " programs in different order would swap data unnoticed. Give the two functions different"
        " names (f.__name__), pass the object's numbers as an argument, or use one object in both"
    )
