"""Texts that islands continue together equal the texts of one process."""

import sys
from collections.abc import Sequence

import pytest

from tests.support.commands import Word, launch, python
from tests.support.jobs import ROOT

MODELS = ROOT / "tests" / "python" / "models" / "golden"
TEXTS = ("5,6,7,8,9,10,11,12", "9,3", "60,61,62,63,1")


def continued(job: Sequence[Word], family: str, *options: str) -> list[str]:
    """The texts that the command prints, without the launcher's prefixes and Gloo's words."""
    words = ("--tokens", "--number=12", "--dtype=float32", *options)
    ended = python(*job, "-m", "models.generate", MODELS / family, *TEXTS, *words)
    return [line.rpartition(" ")[2] for line in ended.stdout.splitlines() if "," in line]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-3.2", "qwen3"])
def test_texts_of_islands_are_those_of_one_process(family: str) -> None:
    alone = continued((), family)
    assert len(set(alone)) == len(TEXTS)
    assert all(len(text.split(",")) == 12 for text in alone)
    for devices, mesh in (
        (1, "data=2"),
        (1, "model=2"),
        (2, "data=2,model=2"),
        (2, "stage=2,model=2"),
    ):
        job = launch("--islands=2", f"--devices={devices}")
        assert continued(job, family, f"--mesh={mesh}") == alone, mesh


@pytest.mark.slow
def test_other_seed_of_an_island_is_refused() -> None:
    words = f"{sys.executable} -m models.generate {MODELS / 'qwen3'} {TEXTS[0]} --tokens"
    *job, _ = launch("--islands=2")
    program = ("sh", "-c", f"exec {words} --seed=$JAXHET_PROCESS_ID")
    ended = python(*job, *program, exit_code=1)
    assert "differ in --seed (0 in process 0, 1 in process 1)." in ended.stderr
