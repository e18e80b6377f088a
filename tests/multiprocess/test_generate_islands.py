"""Texts that islands continue together equal the texts of one process."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxhet.testing import FAST_COMPILE
from tests.support.jobs import PYTHONPATH, ROOT

MODELS = ROOT / "tests" / "python" / "models" / "golden"
TEXTS = ("5,6,7,8,9,10,11,12", "9,3", "60,61,62,63,1")
LAUNCH = ("-m", "jaxhet.cli", "launch", "--islands=2")


def continued(launch: tuple[str, ...], family: str, *options: str) -> list[str]:
    """The texts that the command prints, without the launcher's prefixes and Gloo's lines."""
    generate = ["-m", "models.generate", str(MODELS / family), *TEXTS]
    words = ["--tokens", "--number=12", "--dtype=float32", *options]
    python = [sys.executable] if launch else []
    ended = subprocess.run(
        [sys.executable, *launch, *python, *generate, *words],
        env={**os.environ, **FAST_COMPILE, "PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "[Gloo]" not in line]
    return [line.rpartition(" ")[2] for line in lines]


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
        launch = (*LAUNCH, f"--devices={devices}", "--")
        assert continued(launch, family, f"--mesh={mesh}") == alone, mesh


@pytest.mark.slow
def test_other_seed_of_an_island_is_refused() -> None:
    words = f"{sys.executable} -m models.generate {MODELS / 'qwen3'} {TEXTS[0]} --tokens"
    ended = subprocess.run(
        [sys.executable, *LAUNCH, "--", "sh", "-c", f"exec {words} --seed=$JAXHET_PROCESS_ID"],
        env={**os.environ, **FAST_COMPILE, "PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "differ in --seed (0 in process 0, 1 in process 1)." in ended.stderr
