"""Islands and meshes from processes and devices, of any sizes and order."""

import types
from collections.abc import Sequence
from typing import Any

import jax
import pytest

import jaxhet
from jaxhet import _compilation, _config, _islands, _replicas, _session
from jaxhet._config import Config
from jaxhet._errors import UsageError
from tests.support.members import described


def _make(
    names: str, num_devices: Sequence[int], kinds: str | None = None
) -> tuple[_islands.Island, ...]:
    """Islands of processes with these one-letter islands, numbers and kinds of devices."""
    members = [described(i, name, host=f"host{i}") for i, name in enumerate(names)]
    devices: list[Any] = [
        types.SimpleNamespace(id=2048 * process + i, process_index=process, device_kind=kind)
        for process, (count, kind) in enumerate(zip(num_devices, kinds or names, strict=True))
        for i in range(count)
    ]
    return _islands.make_islands(members, devices[::-1])


def test_islands_of_unequal_size() -> None:
    first, second = _make("abbb", [2, 4, 4, 1])
    assert (first.processes, first.ranks) == ((0,), (0, 1))
    assert (second.processes, second.ranks) == ((1, 2, 3), tuple(range(2, 11)))
    assert [d.id for d in second.devices[-2:]] == [4099, 6144]


def test_islands_whose_processes_are_no_neighbours() -> None:
    first, second = _make("abab", [1, 2, 3, 1])
    assert (first.name, first.index, first.processes, first.ranks) == ("a", 0, (0, 2), (0, 3, 4, 5))
    assert (second.name, second.index, second.processes, second.ranks) == (
        "b",
        1,
        (1, 3),
        (1, 2, 6),
    )
    assert second.hosts == ("host1", "host3")


def test_devices_are_in_the_order_of_ranks_whatever_their_islands() -> None:
    ranks = _islands.by_rank(_make("abab", [1, 2, 3, 1]))
    assert list(ranks) == list(range(7))
    assert [device.process_index for _, device in ranks.values()] == [0, 1, 1, 2, 2, 2, 3]
    assert [island.index for island, _ in ranks.values()] == [0, 1, 1, 0, 0, 0, 1]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices of a session whose islands are interleaved, island by island."""
    session = _session.Session(Config(), 0, _make("abab", [1, 2, 3, 1]))
    monkeypatch.setattr(_session, "_current", [session])
    monkeypatch.setattr(jax.sharding, "Mesh", lambda devices, names: devices)
    return [device for island in session.islands for device in island.devices]


def test_mesh_goes_island_by_island(devices: list[Any]) -> None:
    mesh: Any = jaxhet.make_mesh({"x": -1})
    assert list(mesh) == devices
    assert [d.process_index for d in mesh] == [0, 2, 2, 2, 1, 1, 3]


def test_mesh_that_does_not_hold_all_devices(devices: list[Any]) -> None:
    with pytest.raises(UsageError, match="does not hold the job's 7 devices; choose sizes whose"):
        jaxhet.make_mesh({"x": len(devices), "y": 2})


def test_programs_inside_of_an_island_are_compiled_as_without_jaxhet() -> None:
    compilation = _compilation.Compilation(
        _config.resolve({}, {}),
        0,
        _make("aab", [2, 1, 2]),
        None,
        parts=_compilation.Parts(over_islands={"option": True}),
    )
    first, second, third = ({2048 * process, 2048 * process + 1} for process in range(3))
    assert compilation.compiler_options(frozenset(first | second)) is None
    assert compilation.compiler_options(frozenset(third)) is None
    assert compilation.compiler_options(frozenset(second | third)) == {"option": True}


def test_traced_programs_are_kept_up_to_a_limit() -> None:
    compilation = _compilation.Compilation(_config.resolve({}, {}), 0, (), None)
    digests = []
    for k in range(_compilation._MOST_LOWERED + 2):
        jaxpr = jax.make_jaxpr(lambda x, k=k: x + k)(1.0).jaxpr
        digests.append(compilation.describe("f", jaxpr, (), lambda eqn: ""))
    assert list(compilation.programs) == digests[2:]
    compilation.describe("f", jax.make_jaxpr(lambda x: x + 2)(1.0).jaxpr, (), lambda eqn: "")
    assert list(compilation.programs) == [*digests[3:], digests[2]]


def test_islands_of_other_kinds_of_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replicas, "_arithmetic_differences", lambda: ("equal kinds compute",))
    for kinds, found in (
        ("xx", "equal kinds compute"),
        ("xy", "kinds of devices differ: a has cpu x; b has cpu y"),
    ):
        session = _session.Session(Config(), 0, _make("ab", [2, 2], kinds))
        monkeypatch.setattr(_session, "_current", [session])
        assert jaxhet.unlike_islands() == (found,)
