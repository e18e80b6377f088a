"""`models.suggest` on two small islands: what it suggests can be trained."""

import json
import pathlib
import subprocess
import sys

import pytest

from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import ROOT
from tests.support.scripts import environment


def suggest(islands: int, *options: str) -> subprocess.CompletedProcess[str]:
    launch = ["jaxhet.cli", "launch", f"--islands={islands}", "--devices=1", "--"]
    plan = [sys.executable, "-m", "models.suggest", "--config=tiny", "--batch=8", "--seq=16"]
    return subprocess.run(
        [sys.executable, "-m", *launch, *plan, *options],
        cwd=ROOT,
        env={**environment(), **FAST_COMPILE},
        text=True,
        capture_output=True,
        timeout=800,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_suggestions_are_ranked_and_the_first_is_tried(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "found.json"
    ended = suggest(2, "--accumulate=2", "--try=1", f"--json={path}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    seconds = [each["candidate"]["compute"] + each["exchange"] for each in found]
    assert seconds == sorted(seconds)
    assert min(each["exchange"] for each in found) > 0
    meshes = {each["candidate"]["options"]["mesh"] for each in found}
    assert meshes == {"data=2", "fsdp=2,data=1", "stage=2,data=1"}
    first, *others = found
    assert first["measured_seconds"] > 0
    assert first["num_bytes"] > 0
    assert not any(each["measured_seconds"] for each in others)
    assert all("--mesh" in line for line in ended.stdout.splitlines()[1:])


def test_single_island_has_nothing_to_share() -> None:
    ended = suggest(1)
    assert ended.returncode == 1
    assert "numbers of devices of the islands: island0 1. Start two or more" in ended.stderr
