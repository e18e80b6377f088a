"""What the key of a cached program depends on; tests/multiprocess/test_cache.py has whole jobs."""

import importlib.metadata
import types
from typing import Any

import pytest

from jaxhet import _config, _islands, _session
from jaxhet._session import BridgeOptions, Session

DEVICES: tuple[Any, ...] = tuple(
    types.SimpleNamespace(id=i, process_index=process) for i, process in enumerate([0, 0, 1, 2])
)


def _session_of(
    process: int = 0, names: str = "aab", platform: str = "cpu", **options: Any
) -> Session:
    members = [_islands.Member(i, name, platform, "host") for i, name in enumerate(names)]
    config = _config.resolve(options, environ={})
    return Session(config, process, _islands.make_islands(members, DEVICES))


def _salt(*device_ids: int, **how: Any) -> str:
    return _session_of(**how).cache_salt(device_ids or (0, 1, 2, 3))


def test_salt_is_the_same_in_another_run() -> None:
    assert _salt() == _salt()


@pytest.mark.parametrize(
    "how",
    [
        {"names": "abb"},
        {"names": "abc"},
        {"process": 1},
        {"process": 2},
        {"algorithm": "flat"},
        {"two_phase_bytes": 7},
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
    with _session.bridge_options(BridgeOptions(deadline_s=3)):
        other = _salt()
    assert other != _salt()


def test_salt_of_a_program_inside_one_island_knows_no_islands() -> None:
    assert _salt(0, 1) == _salt(1, 0) == _salt(0, names="abb", algorithm="flat")
    assert _salt(3, process=2) != _salt(0)


def test_processes_of_an_island_share_programs_on_gpus() -> None:
    writers = [_session_of(process, platform="cuda").writes_cache for process in range(3)]
    assert writers == [True, False, True]
    assert _salt(platform="cuda") == _salt(process=1, platform="cuda")
    assert _salt(platform="cuda") != _salt(process=2, platform="cuda")
    assert all(_session_of(process).writes_cache for process in range(3))
