"""JAX's own functions on islands give what they give in a world of JAX's own Gloo."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax_api_worker
import numpy as np
import pytest

from jaxhet.testing import Job, Shape, island_job, joined_job

WORKER = pathlib.Path(jax_api_worker.__file__)
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
    job = island_job(SHAPE, WORKER)
    yield job
    job.close()


@pytest.fixture(scope="module")
def unequal_islands() -> Iterator[Job]:
    job = island_job(UNEQUAL, WORKER)
    yield job
    job.close()


@pytest.fixture(scope="module")
def world() -> Iterator[Job]:
    job = joined_job(SHAPE, WORKER)
    yield job
    job.close()


def _ask(job: Job, name: str, *arguments: object) -> list[Any]:
    """Result of the function on each process."""
    values = {}
    for process, value, error in job.ask((name, arguments)):
        assert error is None, error
        values[process] = value
    return [values[process] for process in sorted(values)]


def _assert_same(mine: list[Any], theirs: list[Any]) -> None:
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", sorted({*jax_api_worker.NAMED} - {"profiler_trace", "orbax"}))
def test_function(name: str, islands: Job, world: Job) -> None:
    _assert_same(_ask(islands, name), _ask(world, name))


@pytest.mark.parametrize("name", SAME_WHEREVER_DEVICES_ARE)
def test_processes_with_unequal_numbers_of_devices(
    name: str, unequal_islands: Job, world: Job
) -> None:
    _assert_same(_ask(unequal_islands, name), _ask(world, name))


def test_checkpoint(islands: Job, world: Job, tmp_path: pathlib.Path) -> None:
    mine, theirs = (_ask(j, "orbax", str(tmp_path / n)) for j, n in ((islands, "a"), (world, "b")))
    _assert_same(mine, theirs)


def test_exchanges_have_names_in_a_trace(islands: Job) -> None:
    for names in _ask(islands, "profiler_trace"):
        assert any(name.startswith("jaxhet.exchange.all_gather") for name in names), names


def test_what_jax_does_not_support_is_its_own_error(islands: Job) -> None:
    for words in _ask(islands, "device_put_to_other_devices"):
        assert "does not support cross-host device transfers" in words
