"""Decomposed programs give what plain JAX gives, with the real engine in one process."""

import importlib.util

import pytest

from jaxhet.testing import FAST_COMPILE
from tests.python.compiler import worker

pytestmark = pytest.mark.early


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arguments", [[], pytest.param(["--all"], marks=pytest.mark.slow)])
def test_programs_over_pretended_islands_agree_with_plain_jax(arguments: list[str]) -> None:
    if importlib.util.find_spec("jaxhet._engine") is None:
        pytest.skip("the extension is not built")
    results = worker.run("one_process.py", *arguments, timeout_s=880, **FAST_COMPILE)
    assert {name: failures for name, failures in results.items() if failures} == {}
    assert len(results) == 38
