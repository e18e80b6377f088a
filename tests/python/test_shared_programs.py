"""Executables travel from the first process of a tuning class to those that ask for them."""

import concurrent.futures
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet._gpu import gpu_settings
from jaxhet._jax import shared_programs
from jaxhet._jax.shared_programs import NotSharedError, SharedPrograms
from tests.support import replaced
from tests.support.store import Store

_MEMBERS = (2, 3, 5)


class _Class:
    """The processes of a tuning class."""

    def __init__(self, timeout_s: float = 20):
        self.store = Store()
        self.of = {p: SharedPrograms(_MEMBERS, p, self.store, timeout_s) for p in _MEMBERS}

    def compile(self, key: str, executable: bytes, process: int = 2) -> None:
        among = _MEMBERS[_MEMBERS.index(process) :]
        with self.of[process].compiling(among, key):
            self.of[process].give(key, executable)

    def fetch(
        self, process: int, key: str = "key", is_over: Callable[[], bool] = lambda: False
    ) -> bytes:
        with self.of[process].compiling(_MEMBERS, key):
            return self.of[process].fetch(_MEMBERS, key, is_over)


_POOL = concurrent.futures.ThreadPoolExecutor()


def _fetching(
    processes: _Class, process: int, key: str = "key"
) -> concurrent.futures.Future[bytes]:
    """A process asks for a program from now on."""
    return _POOL.submit(processes.fetch, process, key)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_GRACE_S", 1.0)
    monkeypatch.setattr(shared_programs, "_POLL_S", 0.1)


def test_only_the_latest_executables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_MOST_KEPT_BYTES", 250)
    processes = _Class()
    for i in range(3):
        processes.compile(f"key{i}", bytes([i]) * 100)
    assert processes.fetch(3, "key2") == bytes([2]) * 100
    assert processes.fetch(3, "key1") == bytes([1]) * 100
    processes.compile("too large", bytes(251))
    for key in ("key0", "key2", "too large"):
        with pytest.raises(NotSharedError, match="it is not kept any more"):
            processes.fetch(3, key)
    processes.compile("key0", b"again")
    assert processes.fetch(3, "key0") == b"again"
    for key in ("key1", "key0", "key3"):
        processes.compile(key, bytes(100))
    assert processes.fetch(3, "key0") == bytes(100)  # compiled after key1


@pytest.mark.usefixtures("short_grace")
def test_process_that_is_ahead_or_behind_is_waited_for() -> None:
    processes = _Class()
    processes.compile("first", b"1")
    assert processes.fetch(3, "first") == b"1"
    waiting = _fetching(processes, 3, "second")
    processes.compile("of others", b"3", process=3)
    time.sleep(2)
    assert not waiting.done()
    processes.compile("second", b"2")
    assert waiting.result(20) == b"2"
    assert processes.fetch(3, "first") == b"1"


@pytest.mark.usefixtures("short_grace")
def test_threads_may_compile_in_another_order() -> None:
    processes = _Class()
    waiting = _fetching(processes, 3, "b")
    with processes.of[2].compiling(_MEMBERS, "b"):
        processes.compile("a", b"1")
        time.sleep(2)
        assert not waiting.done()
        processes.of[2].give("b", b"2")
    assert waiting.result(20) == b"2"
    assert processes.fetch(3, "a") == b"1"


def test_process_that_could_not_compile_says_why() -> None:
    processes = _Class()
    waiting = _fetching(processes, 3)
    with pytest.raises(MemoryError), processes.of[2].compiling(_MEMBERS, "key"):
        raise MemoryError("out of memory")
    for ask in (lambda: waiting.result(20), lambda: processes.fetch(5)):
        with pytest.raises(NotSharedError, match="MemoryError: out of memory"):
            ask()
    processes.compile("key", b"at the second attempt")
    assert processes.fetch(3) == b"at the second attempt"


def test_wait_ends_at_the_deadline() -> None:
    processes = _Class(timeout_s=0.3)
    with pytest.raises(NotSharedError, match=r"not come within 0.3 s \(twice JAXHET_DEADLINE_S\)"):
        processes.fetch(3)


def test_wait_ends_when_the_job_fails() -> None:
    with pytest.raises(NotSharedError, match="the job is over"):
        _Class().fetch(3, is_over=lambda: True)


def test_wait_ends_when_the_store_is_gone() -> None:
    processes = _Class()

    def fail(key: str) -> bytes:
        raise RuntimeError("UNAVAILABLE: connection refused")

    processes.store.key_value_try_get_bytes = fail  # type: ignore[method-assign]
    with pytest.raises(NotSharedError, match="UNAVAILABLE: connection refused"):
        processes.fetch(3)


def test_program_is_shared_by_those_of_the_class_that_run_it() -> None:
    of = _Class().of
    assert [of[p].among({0, 1, 2, 3, 4, 5}) for p in _MEMBERS] == [_MEMBERS] * 3
    assert of[5].among({3, 5}) == (3, 5)
    assert of[3].among({3}) == ()
    assert of[3].among({3, 4}) == ()  # another class
    assert of[3].among({2, 5}) == ()  # a program of others


# --- in JAX; with real executables: tests/multiprocess/test_shared_executables.py ---


@pytest.fixture
def jax_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what the functions put into JAX."""
    replaced.put_back(monkeypatch)


class _Shared(SharedPrograms):
    """One of two processes that share all programs; its messages are noted."""

    def __init__(self, process: int):
        super().__init__((0, 1), process, Store(), 0.1)
        self.told: list[bytes] = []

    def _put(self, key: str, content: bytes) -> None:
        self.told.append(content)


def _compile(
    monkeypatch: pytest.MonkeyPatch,
    serialize: Callable[[Any], bytes],
    process: int = 0,
) -> list[bytes]:
    """Compiles a program of two processes, with a backend that serializes so; the messages."""
    shared = _Shared(process)
    module = jax.jit(jnp.sin).lower(jnp.ones(3)).compiler_ir("stablehlo")
    monkeypatch.setattr(compiler, "backend_compile_and_load", lambda *args: "executable")
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda *args: "executable")
    shared.install(
        shared_programs.Sharing("program", bool, lambda module: True, lambda: None, lambda: False)
    )
    devices = np.array([types.SimpleNamespace(id=i, process_index=i) for i in range(2)])
    options = compiler.get_compile_options(num_replicas=1, num_partitions=2)
    backend = types.SimpleNamespace(serialize_executable=serialize)
    assert compiler.compile_or_get_cached(backend, module, devices, options) == "executable"  # type: ignore[call-arg]
    return shared.told


@pytest.mark.usefixtures("jax_as_it_was")
def test_executable_of_the_cache_is_offered_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile(monkeypatch, str.encode) == [b"+executable"]
    assert _compile(monkeypatch, str.encode, process=1) == []


@pytest.mark.usefixtures("jax_as_it_was")
def test_program_runs_where_its_executable_cannot_be_serialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serialize(executable: Any) -> bytes:
        raise RuntimeError(f"{executable} has no serialization")

    told = _compile(monkeypatch, serialize)
    assert told == [b"-can't send it: executable has no serialization"]


def _module_of(function: Callable[..., Any]) -> Any:
    """The module of a program of two devices."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    x = jax.ShapeDtypeStruct((4, 2), "float32", sharding=NamedSharding(mesh, P("x")))

    def program(x: jax.Array) -> Any:
        return function(x)

    lowered = jax.jit(program).trace(x).lower(lowering_platforms=("cpu",))
    return lowered.compiler_ir("stablehlo")


def _key_of(function: Callable[..., Any], **options: bool) -> str:
    build = compiler.get_compile_options(num_replicas=1, num_partitions=2)
    build.env_option_overrides = [*options.items()]
    devices = np.array([types.SimpleNamespace(id=i) for i in range(2)])
    key = shared_programs._key(_module_of(function), devices, build, is_described=True)
    assert key is not None
    return key


def test_key_of_a_program_is_that_of_its_module_and_options() -> None:
    key = _key_of(lambda x: x + 1)
    assert _key_of(lambda x: x + 1) == key  # at another place of the source
    assert _key_of(lambda x: x + 2) != key
    assert _key_of(lambda x: x + 1, xla_gpu_enable_latency_hiding_scheduler=True) != key


# --- settings ---


@pytest.mark.parametrize(
    ("flags", "is_users"),
    [
        ({}, False),
        ({"xla_gpu_autotune_level": "4"}, False),
        ({"xla_gpu_autotune_level": "0"}, True),
        ({"xla_gpu_load_autotune_results_from": "x"}, True),
        ({"xla_gpu_per_fusion_autotune_cache_dir": "x"}, True),
    ],
)
def test_flags_of_the_user_win(flags: dict[str, str], is_users: bool) -> None:
    assert gpu_settings.user_controls_tuning(flags) is is_users
