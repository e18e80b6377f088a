"""Compressed exchanges give the reference's bits, and only what may be compressed is."""

import importlib.util

import pytest

from jaxhet._options import CODECS
from jaxhet.compiler import codecs
from jaxhet.testing import FAST_COMPILE
from tests.python.compiler import worker

pytestmark = pytest.mark.early


@pytest.mark.timeout(600)
def test_compressed_exchanges_have_the_bits_of_the_reference() -> None:
    if importlib.util.find_spec("jaxhet._engine") is None:
        pytest.skip("the extension is not built")
    results = worker.run("wire_cases.py", timeout_s=580, **FAST_COMPILE)
    assert {name: failures for name, failures in results.items() if failures} == {}
    assert len(results) == 4 + 2 * (len(CODECS) + 2) + 2


def test_options_name_the_codecs_of_the_passes() -> None:
    assert set(CODECS) == set(codecs.CODECS)
