"""`jaxhet.plan` predicts the engine's counters."""

import pathlib

import planned
import pytest

from jaxhet.testing import FAST_COMPILE, Shape, island_job

EXCHANGES = {  # in each step
    "flat": {"scan": 20, "train_step": 2, "local": 0},
    "hierarchical": {"scan": 20, "train_step": 1},
}


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_plan_is_what_the_engine_counts(algorithm: str, tmp_path: pathlib.Path) -> None:
    env = {
        "JAXHET__ALGORITHM": algorithm,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with island_job(Shape(2, 1, 2), env={**FAST_COMPILE, **env}) as job:
        for name, exchanges in EXCHANGES[algorithm].items():
            for answer in job.ask((planned.answer, (name,))):
                report, *others = answer["reports"]
                assert report.exchanges_per_step == exchanges, name
                assert report.is_exact, name
                assert answer["exchanges"] == 2 * report.exchanges_per_step, name  # two ranks
                assert answer["bytes"] == 2 * report.bytes_per_step, name
                assert answer["hits"] == 1, name
                assert others == [report] * 2, name
