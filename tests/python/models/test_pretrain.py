from pathlib import Path

import pytest

from models import pretrain
from models.records import METRICS, PLOT, compare_replicas, read_rows


@pytest.fixture(autouse=True)
def compile_fast(monkeypatch, fast_jit):
    monkeypatch.setattr(pretrain.jaxhet, "jit", fast_jit)


def train(run_dir: Path, **options) -> None:
    """Trains the smallest model for a few steps on all devices; `resume=True` adds `--resume`."""
    values = {"config": "tiny", "batch": 8, "seq": 16, "mesh": "data=-1,model=2", "log_every": 2}
    values |= {"run_dir": run_dir, **options}
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in values.items()
    ]
    pretrain.main([*words, "--digest"])


def final_digests(run_dir: Path) -> list[dict]:
    rows = read_rows(run_dir / "digests-0.jsonl")
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(run_dir / METRICS)]


def test_resumed_run_continues_to_the_bit(tmp_path):
    train(tmp_path / "whole", steps=6)
    train(tmp_path / "halves", steps=3)
    train(tmp_path / "halves", steps=6, resume=True)
    assert [step for step, _ in losses(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert final_digests(tmp_path / "halves") == final_digests(tmp_path / "whole")
    assert (tmp_path / "whole" / PLOT).exists()
    for name in ("whole", "halves"):
        replicas = compare_replicas(tmp_path / name)
        assert replicas.equal, replicas.differences


def test_run_goes_on_from_the_newest_checkpoint(tmp_path, capsys):
    train(tmp_path, steps=5, checkpoint_every=2)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "5"}
    with pytest.raises(SystemExit, match="holds a run of 5 steps: give --resume"):
        train(tmp_path, steps=6)
    with pytest.raises(
        SystemExit, match=r"can't resume from step 5.*seed was 0 and is 1.*--run-dir"
    ):
        train(tmp_path, steps=6, resume=True, seed=1)
    train(tmp_path, steps=6, resume=True)
    assert "step 6/6" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_train(dtype, tmp_path):
    train(tmp_path, steps=4, dtype=dtype)
    assert losses(tmp_path)[-1][1] < 5.7
    assert compare_replicas(tmp_path).equal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "rows=2"}, "'rows=2' is not of the form data=2,model=2"),
        ({"mesh": "model=2,data=2"}, "is not of the form data=2,model=2"),
        ({"mesh": "data=two"}, "is not of the form data=2,model=2"),
        ({"batch": 7}, "can't be split over data="),
        ({"data": "/no/such/file"}, "No such file"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(options, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        train(tmp_path, steps=1, **options)


def test_unknown_config_lists_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, steps=1, config="huge")
    assert "'tiny', 'demo', '1b', '8b'" in capsys.readouterr().err.replace("tiny,", "'tiny',")


def test_steps_must_be_positive(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, steps=0)
    assert "--steps must be at least 1" in capsys.readouterr().err
