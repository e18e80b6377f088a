"""JAX's own functions on islands give what they give in a world of JAX's own Gloo."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax_api_worker
import numpy as np
import pytest

from jaxhet.testing import Job, Shape, island_job, joined_job

SHAPE = Shape(2, processes=(1, 2), devices=2)
UNEQUAL = Shape(2, processes=(1, 2), devices=(4, 2))
SAME_WHEREVER_DEVICES_ARE = (
    "broadcast_one_to_all",
    "process_allgather",
    "sync_global_devices",
    "assert_equal_of_what_differs",
    "device_put_is_exact",
)


@pytest.fixture(scope="module")
def islands() -> Iterator[Job]:
    with island_job(SHAPE) as job:
        yield job


@pytest.fixture(scope="module")
def unequal_islands() -> Iterator[Job]:
    with island_job(UNEQUAL) as job:
        yield job


@pytest.fixture(scope="module")
def world() -> Iterator[Job]:
    with joined_job(SHAPE) as job:
        yield job


def _ask(job: Job, name: str, *arguments: object) -> list[Any]:
    """Result of the function on each process."""
    values = {}
    for process, value, error in job.ask((jax_api_worker.answer, (name, *arguments))):
        assert error is None, error
        values[process] = value
    return [values[process] for process in sorted(values)]


def _assert_same(mine: list[Any], theirs: list[Any]) -> None:
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


_WITH_FOLDER = {"profiler_trace", "orbax", "orbax_without_async"}


@pytest.mark.parametrize("name", sorted({*jax_api_worker.NAMED} - _WITH_FOLDER))
def test_function(name: str, islands: Job, world: Job) -> None:
    if name == "no_collectives" and not hasattr(jax.sharding, name):
        pytest.skip(f"jax {jax.__version__} has no jax.sharding.no_collectives; 0.12 has it")
    _assert_same(_ask(islands, name), _ask(world, name))


@pytest.mark.parametrize("name", SAME_WHEREVER_DEVICES_ARE)
def test_processes_with_unequal_numbers_of_devices(
    name: str, unequal_islands: Job, world: Job
) -> None:
    _assert_same(_ask(unequal_islands, name), _ask(world, name))


@pytest.mark.parametrize("name", ["orbax", "orbax_without_async"])
def test_checkpoint(name: str, islands: Job, world: Job, tmp_path: pathlib.Path) -> None:
    mine, theirs = (_ask(j, name, str(tmp_path / n)) for j, n in ((islands, "a"), (world, "b")))
    _assert_same(mine, theirs)


def test_exchanges_have_names_in_a_trace(islands: Job) -> None:
    for names in _ask(islands, "profiler_trace"):
        assert any(name.startswith("jaxhet.exchange.all_gather") for name in names), names


def test_device_put_between_islands(islands: Job, unequal_islands: Job) -> None:
    assert min(_ask(islands, "move_all", 0)) > 5
    assert min(_ask(unequal_islands, "move_all", 1)) > 5


def test_device_put_between_islands_is_as_jax_does(islands: Job) -> None:
    key_data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(5), 8)))
    first, *others = _ask(islands, "as_jax_does")
    assert first == [True, False, "key<fry>", []]
    for is_donated, is_kept_deleted, _, shards in others:
        assert (is_donated, is_kept_deleted) == (True, False)
        for index, data in shards:
            np.testing.assert_array_equal(data, key_data[index])


def test_device_put_of_an_array_of_all_processes_to_a_device_is_refused_by_jax(
    islands: Job,
) -> None:
    for words, total in _ask(islands, "refusal_of_a_device"):
        assert "must be a fully addressable array" in words
        assert total == 66


def test_device_put_between_islands_refuses_host_memory(islands: Job) -> None:
    for words in _ask(islands, "refusal_of_host_memory"):
        assert words.startswith("jax.device_put between islands, from NamedSharding(")
        assert words.endswith(
            "memory of kind pinned_host is not moved between islands; move the array between it and"
            " memory of kind device in a second call"
        )
