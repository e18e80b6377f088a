"""Channels between GPUs (tests/cpp/device_exchange_test.cc), RDMA over the software libibverbs."""

import os
import subprocess

import pytest

from benchmarks import gpus
from tools.programs import build, results_of

_ENV = {
    "TEST_VENDOR": "cuda",
    "SOFTVERBS_COPY": "cuda",
    # Ranks of one process share GPUs: with the usual 8 a stream may wait behind another rank's.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [
        "SwapsAnySize",
        "ManyAreInFlight",
        "ProgramIsNotHeldByItsSends",
        "RandomExchangesOfThreeRanks",
        "CloseWaitsForWhatIsInFlight",
        "PeerThatLeavesTakesNothingBack",
    ],
)
def test_channels_between_gpus(check: str) -> None:
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    ended = subprocess.run(
        [build("device_exchange_test"), f"--gtest_filter=*.{check}*"],
        env={**os.environ, **_ENV},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = ended.stdout + ended.stderr
    assert {result for result, _ in results_of(ended.stdout)} == {"OK"}, text
    assert ended.returncode == 0, text
