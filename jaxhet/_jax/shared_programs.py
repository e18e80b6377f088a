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
import contextvars
import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxhet._jax import compat, programs
from jaxhet._jax.replacements import install
from jaxhet._log import LOGGER

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


@dataclasses.dataclass
class _Compilation:
    """A program that this process compiles or loads.

    Attributes:
      among: The processes that share it; the first compiles it.
      key: Identity of the program.
      serialized: The executable, once it was serialized.
      is_told: Whether this process has sent it, or why it can't.
    """

    among: tuple[int, ...]
    key: str
    serialized: bytes | None = None
    is_told: bool = False


_current: contextvars.ContextVar[_Compilation | None] = contextvars.ContextVar(
    "jaxhet_compilation", default=None
)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Facts about programs and the job, for `SharedPrograms`.

    Attributes:
      attribute: The frontend attribute of a module that names its program.
      is_described: Whether a program's digest describes the Python functions that XLA calls while
        it compiles. (The module itself has only their addresses.)
      accept: Registers the plan of a compiled module; returns whether it may be used.
      failure: The job's failure, or None.
      is_over: Whether the job has failed or ended.
    """

    attribute: str
    is_described: Callable[[str], bool]
    accept: Callable[[bytes], bool]
    failure: Callable[[], Exception | None]
    is_over: Callable[[], bool]


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

    def install(self, sharing: Sharing) -> None:
        """Lets this process load an executable where JAX would compile a program.

        JAX's persistent compilation cache is asked first.
        """
        _watch_cache()

        @install("jax._src.compiler:compile_or_get_cached")
        def compile_or_get_cached(
            compile: Any, backend: Any, module: Any, devices: Any, options: Any, *args: Any
        ) -> Any:
            processes = {d.process_index for d in devices.flat}
            among = self.among(processes if programs.is_run(backend) else ())
            program = programs.frontend_attributes(module).get(sharing.attribute)
            is_described = sharing.is_described("" if program is None else program.value)
            key = _key(module, devices, options, is_described) if among else None
            if key is None:
                return compile(backend, module, devices, options, *args)
            this = _Compilation(among, key)
            token = _current.set(this)
            try:
                with self.compiling(among, key):
                    found = compile(backend, module, devices, options, *args)
                    if among[0] == self._process and not this.is_told:  # JAX's cache had it
                        self._tell(
                            this, lambda: this.serialized or backend.serialize_executable(found)
                        )
            finally:
                _current.reset(token)
            return found

        @install("jax._src.compiler:backend_compile_and_load")
        def compile_and_load(
            compile: Any, backend: Any, module: Any, devices: Any, options: Any, callbacks: Any
        ) -> Any:
            this = _current.get()
            if this is None:
                return compile(backend, module, devices, options, callbacks)
            this.serialized = None  # refused, if the cache had one
            if this.among[0] != self._process:

                def load(serialized: bytes) -> Any:
                    return backend.deserialize_executable(serialized, devices, options, callbacks)

                if (found := self._load(this, load, sharing)) is not None:
                    return found
            found = compile(backend, module, devices, options, callbacks)
            if this.among[0] == self._process:
                # Sent before JAX's cache writes its file, because other processes wait.
                self._tell(this, lambda: backend.serialize_executable(found))
            return found

    def _tell(self, this: _Compilation, serialize: Callable[[], bytes]) -> None:
        """Sends the executable to the processes that ask for it, or why it can't be serialized.

        Called before the program runs: beside an exchange that waits for others, serialization hung
        on GPUs.
        """
        this.is_told = True
        try:
            this.serialized = serialize()
            self.give(this.key, this.serialized)
        except Exception as error:
            self.refuse(this.key, f"can't send it: {error}")

    def _load(self, this: _Compilation, load: Callable[[bytes], Any], sharing: Sharing) -> Any:
        """The executable of the first process; None if this process has to compile the program."""
        start = time.monotonic()
        try:
            serialized = self.fetch(this.among, this.key, sharing.is_over)
            waited_s = time.monotonic() - start
            executable = load(serialized)
            if not all(map(sharing.accept, compat.serialized_modules(executable))):
                raise NotSharedError("it was compiled by other passes, or for another job")
        except Exception as error:
            if (failure := sharing.failure()) is not None:
                raise failure from None
            text = str(error) if isinstance(error, NotSharedError) else repr(error)
            LOGGER.warning(
                "process %d did not give the executable of a program: %s. This process compiles"
                " the program and tunes its kernels, and replicas may differ in their last bits",
                this.among[0],
                text,
            )
            return None
        this.serialized = serialized
        LOGGER.debug(
            "loaded an executable of %d bytes in %.2f s, after process %d had sent it in %.2f s",
            len(serialized),
            time.monotonic() - start - waited_s,
            this.among[0],
            waited_s,
        )
        return executable

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


def _watch_cache() -> None:
    """Keeps executables in their serialized form where JAX's cache reads and writes them."""

    @install("jax._src.compilation_cache:get_executable_and_time")
    def read_bytes(read: Any, key: str, options: Any, backend: Any, *args: Any) -> Any:
        this = _current.get()
        return read(key, options, _Loading(backend, this) if this else backend, *args)

    @install("jax._src.compilation_cache:put_executable_and_time")
    def write_bytes(
        write: Any, key: str, name: str, executable: Any, backend: Any, seconds: int
    ) -> Any:
        this = _current.get()
        known = _Serialized(this.serialized) if this and this.serialized else executable
        write(key, name, known, backend, seconds)


@dataclasses.dataclass
class _Serialized:
    """A loaded executable with its bytes: XLA may not be able to serialize it again."""

    content: bytes

    def serialize(self) -> bytes:
        return self.content


class _Loading:
    """A backend that keeps the bytes of loaded executables."""

    def __init__(self, backend: Any, compilation: _Compilation):
        self._backend = backend
        self._compilation = compilation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def deserialize_executable(self, serialized: bytes, *args: Any) -> Any:
        self._compilation.serialized = serialized
        return self._backend.deserialize_executable(serialized, *args)


# The address of a Python object, by which `custom_partitioning` finds its functions.
_ADDRESS = re.compile(r'(@CustomSPMDPartitioning\(.*?backend_config = )"\d+"')
# A call of a function of the process that compiles, which no digest describes.
_INSPECTS = "@InspectSharding("


def _key(module: Any, devices: Any, options: Any, is_described: bool) -> str | None:
    """A digest of a module, equal in all processes of a program, and of XLA's options for it.

    It omits source locations, since processes may have different folders, and addresses. The
    digest in the module's attribute describes the objects at these addresses.

    Returns:
      The digest; None if the program can't be shared, because it holds an unknown address.
    """
    text, num_addresses = _ADDRESS.subn(r"\1", module.operation.get_asm(enable_debug_info=False))
    if (num_addresses and not is_described) or _INSPECTS in text:
        return None
    build = options.executable_build_options
    facts = (
        [device.id for device in devices.flat],
        sorted((str(name), str(value)) for name, value in options.env_option_overrides),
        hashlib.blake2b(build.fdo_profile or b"", digest_size=16).hexdigest(),
        options.profile_version,
    )
    return hashlib.blake2b(f"{facts}\n{text}".encode(), digest_size=16).hexdigest()
