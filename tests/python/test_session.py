"""The session of one process: keys of cached programs, and what differs on GPUs.

tests/multiprocess/ has whole jobs.
"""

import dataclasses
import importlib.metadata
import pathlib
import re
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

import jaxhet
from jaxhet import _compilation, _config, _device_channels, _ffi, _islands, _session, _set_up
from jaxhet._compilation import BridgeOptions
from jaxhet._errors import PeerError, TransportError, UsageError
from jaxhet._jax import compat, multihost, programs
from jaxhet._session import Session
from tests.python.compiler import hlo_text
from tests.support.fake_engine import FakeEngine
from tests.support.members import described

DEVICES: tuple[Any, ...] = tuple(
    types.SimpleNamespace(
        id=i, process_index=process, local_hardware_id=ordinal, device_kind="a GPU"
    )
    for i, (process, ordinal) in enumerate([(0, 0), (0, 1), (1, 0), (2, 4)])
)


def _session_of(
    process: int = 0, names: str = "aab", platform: str = "cpu", **options: Any
) -> Session:
    members = [described(i, name, platform=platform) for i, name in enumerate(names)]
    config = _config.resolve(options, environ={})
    return Session(config, process, _islands.make_islands(members, DEVICES))


def _salt(*device_ids: int, **how: Any) -> str:
    return _session_of(**how).compilation.cache_salt(device_ids or (0, 1, 2, 3))


@pytest.mark.parametrize(
    "how",
    [
        {"names": "abb"},
        {"names": "abc"},
        {"process": 1},
        {"process": 2},
        {"algorithm": "flat"},
        {"pipeline_iterations": 7},
        {"platform": "cuda"},
    ],
    ids=str,
)
def test_salt_differs_where_the_program_would(how: dict[str, Any]) -> None:
    assert _salt(**how) != _salt()


def test_salt_differs_by_order_of_devices_and_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _salt()
    assert _salt(3, 2, 1, 0) != before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "999")
    assert _salt() != before


def test_salt_differs_by_options_of_one_function() -> None:
    with _compilation.bridge_options(BridgeOptions(deadline_s=3)):
        other = _salt()
    assert other != _salt()


def test_dump_has_the_module_and_the_plan_as_text(tmp_path: pathlib.Path) -> None:
    module = hlo_text.parsed("HloModule one\nENTRY e { ROOT x = f32[3] parameter(0) }")
    compilation = _session_of(dump=str(tmp_path / "new")).compilation
    compilation._dump(module, "before")
    plan: Any = types.SimpleNamespace(text="the plan", program="0123")
    compilation._dump(module, "after", plan)
    texts = {file.name: file.read_text() for file in (tmp_path / "new").iterdir()}
    assert "f32[3]{0} parameter(0)" in texts.pop("process0.0000.one.before.hlo.txt")
    assert "f32[3]{0} parameter(0)" in texts.pop("process0.0001.one.after.hlo.txt")
    assert texts == {"process0.0001.one.plan.txt": "the plan"}


def test_salt_of_a_program_inside_one_island_knows_no_islands() -> None:
    assert _salt(0, 1) == _salt(1, 0) == _salt(0, names="abb", algorithm="flat")
    assert _salt(3, process=2) != _salt(0)


def test_processes_of_an_island_share_programs_on_gpus() -> None:
    writers = [
        _session_of(process, platform="cuda").compilation.writes_cache for process in range(3)
    ]
    assert writers == [True, False, True]
    assert _salt(platform="cuda") == _salt(process=1, platform="cuda")
    assert _salt(platform="cuda") != _salt(process=2, platform="cuda")
    assert all(_session_of(process).compilation.writes_cache for process in range(3))


def test_processes_with_equal_models_of_gpus_share_programs() -> None:
    gpus = [("MI300X, 304", "MI300X, 304"), ("MI250X, 110",), ("MI300X, 304", "MI300X, 304")]
    membership: Any = types.SimpleNamespace(
        members=[described(process, gpus=models) for process, models in enumerate(gpus)],
        tell_of_program=None,
        listen_programs=lambda hear: None,
    )
    shared = _set_up._shared(_config.resolve({}, {}).placed(0, 3), membership)
    assert shared._members == {0, 2}


def test_different_gpus_of_one_name_are_refused() -> None:
    """ROCm's plugin gave all devices of a process the name of the first (ROCm/rocm-jax#390)."""

    def check(*kinds: str, models: tuple[str, ...]) -> None:
        devices: list[Any] = [
            types.SimpleNamespace(local_hardware_id=ordinal, device_kind=kind)
            for ordinal, kind in enumerate(kinds)
        ]
        gpus = [{"ordinal": ordinal, "model": model} for ordinal, model in enumerate(models)]
        _set_up._check_gpus(devices, gpus)

    check("MI300X", "MI300X", models=("MI300X, 304", "MI300X, 304", "of another process"))
    check("H100", "H200", models=("H100, 132", "H200, 132"))
    with pytest.raises(UsageError, match=re.escape("differ (MI300X, 304, MI250X, 110), and JAX")):
        check("MI300X", "MI300X", models=("MI300X, 304", "MI250X, 110"))


# GPUs.

MIXED = (("a", "cuda"), ("b", "rocm"), ("b", "rocm"))


@dataclasses.dataclass
class _Memory:
    nbytes: int

    def unsafe_buffer_pointer(self) -> int:
        return 1000


def _mixed_session(
    process: int,
    engine: FakeEngine,
    named: tuple[tuple[str, str], ...] = MIXED,
    parts: _session.Parts = _session._NO_PARTS,
) -> Session:
    members = [described(i, name, platform=p) for i, (name, p) in enumerate(named)]
    islands = _islands.make_islands(members, DEVICES)
    stand_in: Any = engine
    return Session(_config.resolve({}, environ={}), process, islands, stand_in, parts)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings of XLA and JAX."""
    made: list[Any] = []
    for module, name in (
        (compat, "register_passes"),
        (multihost, "allow_unequal_processes"),
        (multihost, "synchronize_by"),
        (compat, "guard_compilation_cache"),
        (programs, "watch_lowering"),
        (programs, "guard_launches"),
        (programs, "own_launches"),
        (compat.jax.ffi, "register_ffi_target"),
    ):
        note = lambda *args, name=name, **named: made.append((name, args, named))  # noqa: E731
        monkeypatch.setattr(module, name, note)
    handlers = {"cpu": {"exchange": 1}, "gpu": {"start": 2, "done": 3}}
    monkeypatch.setattr(_ffi._engine, "handlers", lambda: handlers)
    monkeypatch.setattr(compat, "memory_on", lambda _device, size: _Memory(size))
    return made


@pytest.mark.parametrize(
    ("process", "platform", "mine"),
    [
        (0, "cuda", [(0, 0, 1000, 256), (1, 1, 1000, 256)]),
        (1, "rocm", [(2, 0, 1000, 256)]),
        (2, "rocm", [(3, 4, 1000, 256)]),
    ],
)
def test_each_process_is_set_up_for_its_own_platform(
    calls: list[Any], process: int, platform: str, mine: list[tuple[int, int, int, int]]
) -> None:
    engine = FakeEngine()
    stand_in: Any = engine
    session = _mixed_session(process, engine)
    _set_up._set_ranks(session, stand_in)
    members = [described(i, host_id="one") for i in range(3)]
    listener: Any = types.SimpleNamespace(
        process=process, num_processes=3, take=lambda *_, **__: {}
    )
    config = session.config.placed(process, 3)
    others = {0, 1, 2} - {process}
    channels = _device_channels.plan_channels(config, session.islands, members, others)
    _set_up._open_devices(session, stand_in, members, listener, channels, lambda: None)
    _set_up._bridge(session, list(DEVICES[::-1]))
    ranks = [(0, "cuda"), (0, "cuda"), (1, "rocm"), (1, "rocm")]
    assert engine.calls == [("set_ranks", ranks), ("open_devices", platform, mine, [], 60.0, [])]
    assert [args[2] for name, args, _ in calls if name == "register_passes"] == [platform]
    assert [
        (*args, named["platform"]) for name, args, named in calls if name == "register_ffi_target"
    ] == [("start", 2, platform.upper()), ("done", 3, platform.upper())]
    assert session.compilation._job.platform == platform
    session.close(0)


def _start(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> Session:
    """The work of `initialize` in process 0 after all connections were made."""
    monkeypatch.setattr(compat, "connect_client", lambda *_: None)
    monkeypatch.setattr(_set_up, "_create_backend", lambda *_: list(DEVICES))
    members = [described(i, name, platform=platform) for i, (name, platform) in enumerate(MIXED)]
    membership: Any = types.SimpleNamespace(
        members=members,
        service_address="",
        local_address="",
        credentials={},
        failure=None,
        loss=None,
        when_lost=lambda action: None,
        check=lambda: None,
        leave=lambda: None,
    )
    monkeypatch.setattr(compat, "bind_gloo", lambda *_: None)
    relay = types.SimpleNamespace(url="", close=lambda: None)
    monkeypatch.setattr(_ffi, "Relay", lambda _: relay)
    monkeypatch.setattr(_set_up, "_set_partitions", lambda *_: None)
    listener: Any = types.SimpleNamespace(
        process=0, num_processes=len(MIXED), take=lambda *_, **__: {}
    )
    config = _config.resolve({}, environ={}).placed(0, len(MIXED))
    stand_in: Any = engine
    connected = frozenset(range(1, len(MIXED)))
    return _set_up._start_jax(_set_up._Job(config, membership, listener, stand_in, connected))


def test_set_up_that_fails_leaves_nothing_behind(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine(FakeEngine):
        def open_devices(self, *args: Any, **named: Any) -> None:
            raise TransportError("no transport leads from rank 0")

    left = []
    monkeypatch.setattr(compat, "disconnect_client", lambda: left.append("the service"))
    with pytest.raises(TransportError, match="no transport leads from rank 0"):
        _start(monkeypatch, Engine())
    assert calls == []
    assert left == ["the service"]
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxhet-watch"]


@pytest.fixture
def gpu_session() -> Iterator[Session]:
    """A session on a GPU, as far as it knows."""
    session = _mixed_session(0, FakeEngine())
    _session.install(session)
    yield session
    _session.remove()
    session.close(0)


def test_failure_that_poisons_results_is_raised_at_the_call_and_when_they_are_ready(
    gpu_session: Session,
) -> None:
    engine: Any = gpu_session.engine

    def fails_while_it_is_called(x: Any) -> Any:
        engine.fail("PeerError", "process 1 is gone")
        return x

    result = jaxhet.jit(lambda x: x + 1)(1)
    assert int(jaxhet.block_until_ready(result)) == 2
    with pytest.raises(PeerError, match="process 1 is gone"):
        jaxhet.jit(fails_while_it_is_called)(1)
    with pytest.raises(PeerError, match="process 1 is gone"):
        jaxhet.block_until_ready(result)
    with pytest.raises(PeerError, match="process 1 is gone"):
        jaxhet.jit(lambda x: x + 1)(1)


@pytest.mark.parametrize(("failed", "waits_s", "closes_ms"), [(False, 300, 300_000), (True, 5, 0)])
def test_engine_is_closed_after_the_device_work(
    monkeypatch: pytest.MonkeyPatch, failed: bool, waits_s: float, closes_ms: int
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(_ffi, "fail_exit", lambda code: engine.calls.append(("exit", code)))

    def wait(timeout_s: float) -> bool:
        engine.calls.append(("wait", timeout_s))
        return True

    session = _mixed_session(0, engine, parts=_session.Parts(wait_for_devices=wait))
    observer: Any = types.SimpleNamespace(
        failed=lambda: None, close=lambda: engine.calls.append("the observer's close")
    )
    session.observe(observer)
    if failed:
        engine.fail("PeerError", "gone")
    session.close(300)
    exits = [("exit", 70)] if failed else []
    assert engine.calls == [
        ("wait", waits_s),
        "the observer's close",
        ("close", closes_ms),
        *exits,
    ]
