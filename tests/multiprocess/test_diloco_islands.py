"""`models.pretrain --diloco` over two islands: a resumed run continues an exchange under way."""

import pathlib
import shutil

import pytest

from jaxhet.testing import FAST_COMPILE
from models.extras.records import METRICS, compare_replicas, read_rows
from tests.support.scripts import job, run

# Exchanges start in steps 4 and 8, and end in steps 6 and 10.
PROGRAM = """
import os
from models import pretrain
pretrain.main([
    "--config=tiny", "--batch=8", "--seq=16", "--warmup=1", "--steps=9", "--log-every=3",
    "--eval-every=8", "--checkpoint-every=" + os.environ["EVERY"], "--keep=9",
    "--diloco", "--diloco-sync-period=4",
    "--num-communication-overlapping-steps=2", "--wire=mxint4", "--digest", "--resume",
    "--mesh=" + os.environ["MESH"], "--run-dir=" + os.environ["FOLDER"]])
"""


@pytest.mark.timeout(590)
@pytest.mark.parametrize(
    ("mesh", "devices", "steps"),
    [
        ("data=2", 1, (5,)),
        pytest.param("data=2,fsdp=2", 2, (5, 7), marks=pytest.mark.slow),
    ],
)
def test_run_resumed_between_start_and_finish_has_the_losses_of_a_whole_one(
    mesh: str, devices: int, steps: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    def measured(name: str) -> list[tuple[float, ...]]:
        settings = {"MESH": mesh, "JAX_NUM_CPU_DEVICES": str(devices), **FAST_COMPILE}
        every = "1" if steps[1:] else str(steps[0])
        jobs = job(2, FOLDER=str(tmp_path / name), EVERY=every, **settings)
        for ended in run(PROGRAM, *jobs, timeout_s=190):
            assert ended.code == 0, ended.text
            assert "unless a checkpoint has the handle" in ended.text
        rows = read_rows(tmp_path / name / METRICS)
        names = ("step", "loss", "gradient_norm", "eval_loss")
        return [tuple(row.get(n, 0.0) for n in names) for row in rows]

    whole = measured("whole")
    assert [row[0] for row in whole] == list(range(1, 10))
    assert len({row[1] for row in whole}) == 9
    replicas = compare_replicas(tmp_path / "whole")
    assert replicas.equal, replicas.differences
    for step in steps:
        saved = f"checkpoints/{step}"
        shutil.copytree(tmp_path / "whole" / saved, tmp_path / f"from{step}" / saved)
        assert measured(f"from{step}") == whole[step:]
