"""Training over two islands that stops because its loss is not finite."""

import pathlib
import re
import subprocess
import sys

import pytest

from models.records import METRICS, read_rows
from tests.support.jobs import ROOT

LAUNCH = ("jaxhet.cli", "launch", "--islands=2", "--devices=1", "--")
# A step of that rate makes all parameters so large that the next loss is not finite.
TRAIN = ("models.pretrain", "--config=tiny", "--batch=4", "--seq=16", "--mesh=data=2", "--warmup=1")
WRONG = ("--learning-rate=1e30", "--steps=9", "--checkpoint-every=1", "--log-every=9")


@pytest.mark.slow
def test_loss_that_is_not_finite_ends_each_process_in_words(tmp_path: pathlib.Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", *LAUNCH, sys.executable, "-m", *TRAIN, *WRONG),
            f"--run-dir={tmp_path}",
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    words = (
        r"^\[(island\d)/\d\] python -m models.pretrain: "
        r"the (?:loss|gradient norm) is (?:nan|inf) at step 2: lower .*; "
        r"the checkpoint of step 1 is kept\."
    )
    said = re.findall(words, ended.stderr, re.MULTILINE)
    assert sorted(said) == ["island0", "island1"], ended.stderr
    assert "Traceback" not in ended.stderr
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1"}
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2]
