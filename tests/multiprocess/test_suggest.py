"""`models.suggest` on two small islands: what it suggests can be trained."""

import json
import pathlib

import pytest

from tests.support.commands import launch, python

SUGGEST = ("-m", "models.suggest", "--config=tiny", "--batch=8", "--seq=16")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_suggestions_are_ranked_and_the_first_is_tried(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "found.json"
    options = ("--accumulate=2", "--try=1", f"--json={path}")
    job = launch("--islands=2", "--devices=1")
    ended = python(*job, *SUGGEST, *options, timeout_s=800)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_times_on_islands_of_unequal_speed_are_as_predicted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "found.json"
    where = tuple(f"--island-env=island{i}:LAYER_S={s}" for i, s in enumerate((0.005, 0.015)))
    plan = ("-m", "tests.multiprocess.several_runs", "suggest", "--config=tiny", f"--json={path}")
    options = ("--batch=16", "--seq=8", "--accumulate=4", "--remat=full", "--try=9")
    job = launch("--islands=2", "--devices=1", *where)
    python(*job, *plan, *options, timeout_s=800)
    found = json.loads(path.read_text())
    words = [each["candidate"]["options"] for each in found]
    assert words[0] == {"mesh": "data=2", "accumulate": 4, "balance": "6,2"}
    measured = [each["measured_seconds"] for each in found]
    assert min(measured[:3]) <= 1.05 * min(measured)
    # The ends of a pipeline are short, and other work on the machine makes them long.
    for each in found:
        if "stage" not in each["candidate"]["options"]["mesh"]:
            predicted = each["candidate"]["compute"] + each["exchange"]
            assert predicted == pytest.approx(each["measured_seconds"], rel=0.15), found


def test_single_island_has_nothing_to_share() -> None:
    ended = python(*launch("--islands=1", "--devices=1"), *SUGGEST, exit_code=1)
    assert "numbers of devices of the islands: island0 1. Start two or more" in ended.stderr
