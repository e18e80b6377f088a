"""`jaxhet.plan` predicts the engine's counters."""

import pytest

from jaxhet.testing import Shape
from tests.support.jobs import Start

EXCHANGES = {  # in each step
    ("scan", "flat"): 20,
    ("scan", "hierarchical"): 20,
    ("train_step", "flat"): 2,
    ("train_step", "hierarchical"): 1,
    ("local", "flat"): 0,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(("name", "algorithm"), EXCHANGES)
def test_plan_is_what_the_engine_counts(
    name: str, algorithm: str, start: Start, cache: str
) -> None:
    workers = start(
        Shape(2, 1, 2),
        JAXHET__ALGORITHM=algorithm,
        JAX_COMPILATION_CACHE_DIR=cache,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    for answer in workers.ask({"planned": name}):
        report, *others = answer["reports"]
        assert report.exchanges_per_step == EXCHANGES[name, algorithm]
        assert report.is_exact
        assert answer["exchanges"] == 2 * report.exchanges_per_step  # two ranks
        assert answer["bytes"] == 2 * report.bytes_per_step
        assert answer["hits"] == 1
        assert others == [report] * 2
