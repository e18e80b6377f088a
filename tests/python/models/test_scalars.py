import importlib.util
import resource

import pytest

from models import pretrain
from models.scalars import Scalars
from tests.python.models.event_files import START, events, scalars


def test_scalars_are_the_numbers_of_the_rows(tmp_path):
    writer = Scalars(tmp_path, start=4)
    writer.append([{"step": 5, "loss": 2.5, "replicas": {"compared": 3}}, {"step": 6, "mfu": 1}])
    assert scalars(tmp_path) == [(5, "loss", 2.5), (6, "mfu", 1.0)]
    writer.close()


def test_resumed_run_has_a_file_of_its_own_that_hides_later_steps(tmp_path):
    for start in (0, 4):
        Scalars(tmp_path, start).close()
    assert len([*tmp_path.iterdir()]) == 2
    found = [*events(tmp_path)]
    assert [e.file_version for e in found if e.file_version] == ["brain.Event:2"] * 2
    assert [e.step for e in found if e.session_log.status == START] == [1, 5]


def test_disk_that_is_full_is_named(tmp_path):
    writer = Scalars(tmp_path, start=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = r"^scalars for TensorBoard can't be written to .*File too large.*: free some space, or"
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match=words):
            writer.append([{"step": step, "loss": 1.0} for step in range(99)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()


def test_missing_writer_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name)
    )
    words = "--tensorboard needs the package tensorboardX.*run `pip install tensorboardX`, or leave"
    with pytest.raises(SystemExit, match=f"^python -m models.pretrain: {words}"):
        pretrain.main(["--config=tiny", "--tensorboard", f"--run-dir={tmp_path}"])
