"""The conformance suite of the transports (tests/cpp/conformance_test.cc) over soft-RoCE."""

import pytest

from tests.rdma_vm.guest import REAL_VERBS, Guest
from tools.programs import build, results_of

pytestmark = pytest.mark.early

_LEAST_CHECKS = 12  # in a world


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ["verbs_2x2", pytest.param("verbs", marks=pytest.mark.slow)])
def test_conformance_in_one_guest(world: str, guest: Guest, subtests: pytest.Subtests):
    packets = guest.packets()
    command = f"{build('conformance_test')} '--gtest_filter=*/{world}'"
    ended = guest.run(command, 800, REAL_VERBS)
    results = results_of(ended.text)
    for result, name in results:
        with subtests.test(name):
            assert result == "OK", ended.text
    assert ended.code == 0, ended.text
    assert len(results) >= _LEAST_CHECKS, ended.text
    assert guest.packets() > packets + 1000 * _LEAST_CHECKS


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_channels_between_devices(guest: Guest):
    """Host memory in place of GPUs'; rxe takes no dma-buf, so it is registered by address."""
    packets = guest.packets()
    command = f"{build('device_exchange_test')} '--gtest_filter=*.ManyAreInFlight/*'"
    ended = guest.run(command, 500, REAL_VERBS)
    assert ended.code == 0, ended.text
    assert {result for result, _ in results_of(ended.text)} == {"OK"}, ended.text
    assert guest.packets() > packets + 1000
