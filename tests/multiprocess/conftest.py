"""Jobs are started once and shared by all tests of a module that need their shape."""

import pathlib
from collections.abc import Iterator

import pytest

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job, world_job
from tests.support.jobs import Start

_WORKER = pathlib.Path(__file__).with_name("worker.py")


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """By shape, or number of devices, and **env: the job of islands, or the one world, with it."""
    jobs: dict[tuple[object, ...], Job] = {}

    def get(shape: Shape | int, **env: str) -> Job:
        key = (shape, *sorted(env.items()))
        if key in jobs and jobs[key].is_broken:
            jobs.pop(key).close()
        if key not in jobs:
            make = world_job if isinstance(shape, int) else island_job
            jobs[key] = make(shape, _WORKER, {**FAST_COMPILE, **env})  # type: ignore[arg-type]
        return jobs[key]

    yield get
    for job in jobs.values():
        job.close()
