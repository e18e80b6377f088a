"""Process ids from islands, their sizes and the index in an island."""

import itertools
from typing import Any

import pytest

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._job import place as _place

_SIZES = {"nvidia": 4, "amd": 2}
_ADDRESS = {"coordinator_address": "nv0:7000"}


def _complete(**options: Any) -> _config.Config:
    return _place.complete(_config.resolve({**_ADDRESS, **options}, {}))


@pytest.mark.parametrize("order", [*itertools.permutations(["a=1", "b=3", "c=2"])])
def test_process_ids_go_through_the_islands_in_order(order: tuple[str, ...]) -> None:
    sizes = announced.sizes(order)
    ids = [announced.process_id(sizes, name, i) for name in sizes for i in range(sizes[name])]
    assert ids == [*range(6)]


def test_sizes_give_process_and_number_of_processes() -> None:
    config = _complete(islands=("nvidia=4", "amd=2"), island="amd", island_process_id=1)
    assert (config.process_id, config.num_processes) == (5, 6)


def test_without_sizes_the_coordinator_gives_the_id() -> None:
    config = _complete(island="amd", island_process_id=1)
    assert (config.process_id, config.num_processes) == (None, None)


def test_index_in_the_only_island_is_the_process_id() -> None:
    config = _complete(island_process_id=1, num_processes=2)
    assert (config.process_id, config.num_processes) == (1, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no process_id: pass it to jaxhet.initialize, set JAXHET_PROCESS_ID"),
        ({"process_id": 0}, "no num_processes: pass it"),
        ({"process_id": 2, "num_processes": 2}, "ids run from 0 to 1"),
        (
            {"islands": ("a=2", "b=1"), "island_process_id": 0},
            "no island: pass it to jaxhet.initialize, set JAXHET_ISLAND",
        ),
        (
            {"islands": ("a=2", "b=1"), "island": "b", "island_process_id": 1},
            "process 1 of island 'b' is one too many: a=2,b=1 were announced",
        ),
        (
            {"islands": ("a=2", "b=1"), "island": "c", "island_process_id": 1},
            "island 'c' is not one of the declared islands a, b",
        ),
        (
            {"islands": ("a=2", "b=1"), "island": "a", "process_id": 0, "num_processes": 2},
            "num_processes=2, and the islands a=2,b=1 have 3 processes; leave num_processes out",
        ),
        (
            {"islands": ("a=2", "b"), "island": "a", "process_id": 0},
            "'b' is not of the form NAME=PROCESSES, as in nvidia=4,amd=2",
        ),
        ({"islands": ("a=0",), "island": "a", "process_id": 0}, "'a=0' is not of the form NAME"),
        (
            {"islands": ("a=1", "a=2"), "island": "a", "process_id": 0},
            "islands a=1,a=2: 'a' is there twice",
        ),
    ],
)
def test_wrong_place_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _complete(**options)


@pytest.mark.parametrize(
    ("islands", "words"),
    [
        (["nvidia"] * 4 + ["amd"] * 2, None),
        (["nvidia"] * 5 + ["amd"], "'nvidia' has 5, not 4; 'amd' has 1, not 2 processes; start"),
        (["nvidia"] * 4 + ["intel"] * 2, "'amd' has 0, not 2; 'intel' has 2, not 0 processes"),
    ],
)
def test_islands_of_other_sizes_are_named(islands: list[str], words: str | None) -> None:
    difference = announced.difference(_SIZES, islands)
    assert (difference is None) == (words is None)
    assert (words or "") in (difference or "")
