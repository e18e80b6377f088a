"""Decomposed programs give what plain JAX gives, with the real engine in one process."""

import importlib.util

import pytest

from tests.python.compiler import worker
from tests.support.jobs import FAST_COMPILE

pytestmark = pytest.mark.early

_NUM_CASES = 73


@pytest.mark.timeout(600)
def test_programs_over_pretended_islands_agree_with_plain_jax():
    if importlib.util.find_spec("jaxhet._engine") is None:
        pytest.skip("the extension is not built")
    results = worker.run("one_process.py", timeout_s=580, **FAST_COMPILE)
    assert {name: failures for name, failures in results.items() if failures} == {}
    assert len(results) == _NUM_CASES
