"""The conformance suite of the transports (tests/cpp/conformance_test.cc) in a guest."""

import pathlib
import re
from collections.abc import Callable

import pytest

from tests.rdma_vm.guest import Guest

_CHECK = re.compile(r"^\[ ( ok |FAIL) \] (\S+)", re.MULTILINE)
_LEAST_CHECKS = 13


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp"])
def test_conformance_in_one_guest(
    transport: str,
    guest: Guest,
    program: Callable[[str], pathlib.Path],
    subtests: pytest.Subtests,
):
    ended = guest.run(f"{program('conformance_test')} {transport}", 500)
    results = _CHECK.findall(ended.text)
    for result, name in results:
        with subtests.test(name):
            assert result == " ok ", ended.text
    assert ended.code == 0, ended.text
    assert len(results) >= _LEAST_CHECKS, ended.text
