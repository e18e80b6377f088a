"""Emergency checkpoints of Orbax over islands: islands that lost their disks are restored.

Replica 0 of the state saves to persistent storage only, and each other replica to the disks of its
processes. The second step is on these disks alone.
"""

import pathlib
import re
import shutil

import pytest

from tests.support.commands import launch, python
from tests.support.jobs import ROOT

_PROGRAM = ROOT / "tests" / "multiprocess" / "emergency_program.py"


def _run(what: str, folder: pathlib.Path, islands: int, processes: int) -> list[str]:
    """Steps that the processes of a job restored."""
    job = launch(f"--islands={islands}", f"--processes-per-island={processes}")
    ended = python(*job, _PROGRAM, what, folder)
    return re.findall(r"restored step (\d+)", ended.stdout)


def _saved(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/[0-9]*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("islands", "processes", "savers", "lost"),
    [(3, 1, (1, 2), (1,)), (2, 2, (2, 3), ())],
    ids=["one of three islands lost its disk", "island 0 has no local checkpoint"],
)
def test_island_without_a_disk_is_restored_from_another(
    islands: int,
    processes: int,
    savers: tuple[int, ...],
    lost: tuple[int, ...],
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "persistent").mkdir()
    assert _run("save", tmp_path, islands, processes) == []
    local = [f"local{process}/{step}" for process in savers for step in (7, 8)]
    assert _saved(tmp_path) == [*local, "persistent/7"]
    for process in lost:
        shutil.rmtree(tmp_path / f"local{process}")
    assert _run("restore", tmp_path, islands, processes) == ["8"] * islands * processes


@pytest.mark.slow
def test_persistent_checkpoint_is_restored_if_all_islands_lost_their_disks(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "persistent").mkdir()
    _run("save", tmp_path, 2, 1)
    shutil.rmtree(tmp_path / "local1")
    assert _run("restore", tmp_path, 2, 1) == ["7", "7"]
