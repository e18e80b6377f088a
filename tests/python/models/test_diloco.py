"""`models.pretrain --diloco` on four devices of one process."""

import pathlib
from typing import Any

import pytest

from models import pretrain
from models.extras.records import METRICS, read_rows

pytestmark = pytest.mark.usefixtures("compile_fast")


def _train(folder: pathlib.Path, *words: str) -> list[dict[str, Any]]:
    pretrain.main(
        [
            *("--config=tiny", "--batch=8", "--seq=16", "--mesh=data=2,model=2", "--warmup=1"),
            *("--steps=5", "--log-every=4", "--digest", f"--run-dir={folder}", *words),
        ]
    )
    return read_rows(folder / METRICS)


def _digests(folder: pathlib.Path) -> list[Any]:
    """Digests of all parameters, by step."""
    rows = read_rows(folder / "digests-0.jsonl")
    steps = sorted({row["step"] for row in rows})
    return [[{**row, "step": 0} for row in rows if row["step"] == step] for step in steps]


def test_parameters_change_by_exchanges_alone(tmp_path: pathlib.Path) -> None:
    plain = _train(tmp_path / "plain")
    apart = _train(tmp_path / "apart", "--diloco", "--diloco-sync-period=5", "--accumulate=2")
    assert apart[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert apart[-1]["loss"] < apart[0]["loss"]
    assert apart[-1]["loss"] != plain[-1]["loss"]
    before, without, after = _digests(tmp_path / "apart")  # before steps 1 and 5, after 5
    assert before == without
    assert before != after


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--mesh=fsdp=4", "has no axis data: each position of data trains for itself"),
        ("--mesh=data=2,stage=2", "has the axis stage: each position"),
        ("--mesh=data=2,expert=2", "has the axis expert: each position"),
        ("--mesh=data=2,sequence=2", "has the axis sequence: each position"),
        ("--update=sharded", "the parts of an update would cross islands in each step"),
        ("--balance=even --accumulate=2", "--balance even with --diloco: .* leave out one"),
        (
            "--diloco-sync-period=2 --num-diloco-fragments=3",
            "--diloco-sync-period 2 with --num-diloco-fragments 3 and",
        ),
        ("--num-communication-overlapping-steps=36", "give .* fewer steps of overlap"),
        ("--wire=data=mxint9", "wire='mxint9' is not valid; codecs: bf16"),
    ],
)
def test_options_that_do_not_fit_are_told(words: str, error: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match=error):
        _train(tmp_path, "--diloco", *words.split())


def test_other_settings_are_no_resumed_run(tmp_path: pathlib.Path) -> None:
    _train(tmp_path, "--diloco", "--steps=1")
    with pytest.raises(SystemExit, match=r"can't resume from step 1 .*diloco was .*'positions': 2"):
        _train(tmp_path, "--diloco", "--diloco-outer-lr=1", "--resume")
