"""Trains two islands and one world (NCCL, on CPU Gloo), and compares the bits of all results."""

import json
import pathlib

import pytest

from tests.gpu.scripts_on_gpus import ON_BOTH, ON_GPUS, require_gpus
from tests.support.commands import python

STEPS = 40
SYSTEMS = {"cuda": "cuda_ipc,host,socket,nccl", "cpu": "host,nccl"}


@pytest.mark.timeout(600)
@ON_BOTH
def test_deterministic_islands_have_the_bits_of_one_world(
    platform: str, tmp_path: pathlib.Path
) -> None:
    require_gpus(platform)
    words = {
        "platform": platform,
        "systems": SYSTEMS[platform],
        "config": "demo" if platform == "cuda" else "tiny",
        "steps": STEPS,
        "log-every": STEPS // 2,
        "dtypes": "bfloat16",
        "run-dir": tmp_path,
        "json": tmp_path / "parity.json",
    }
    options = [f"--{name}={value}" for name, value in words.items()]
    command = ("-m", "benchmarks.gpu_parity", "--deterministic", "--no-floor", *options)
    python(*command, env=ON_GPUS, timeout_s=580)
    *islands, world = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert len(islands) == SYSTEMS[platform].count(",")
    for row in islands:
        equal, compared = row["same_bits"]
        assert row["equal_steps"] == STEPS == len(row["losses"]), row["system"]
        assert equal == compared > 0, row["system"]
        assert row["losses"] == world["losses"], row["system"]
    assert len({*world["losses"]}) > STEPS // 2  # it trains
