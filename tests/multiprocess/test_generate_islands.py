"""Texts that islands continue together are those of one process."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.jobs import FAST_COMPILE, PYTHONPATH, ROOT

MODELS = ROOT / "tests" / "python" / "models" / "golden"
TEXTS = ("5,6,7,8,9,10,11,12", "9,3", "60,61,62,63,1")
LAUNCH = ("-m", "jaxhet.cli", "launch", "--islands=2")


def continued(launch: tuple[str, ...], family: str, *options: str) -> list[str]:
    """The lines that the command prints, without the launcher's prefixes."""
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
    return [line.rpartition(" ")[2] for line in ended.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-3.2", "qwen3"])
def test_texts_of_islands_are_those_of_one_process(family: str) -> None:
    alone = continued((), family)
    assert len(set(alone)) == len(TEXTS)
    assert all(len(text.split(",")) == 12 for text in alone)
    assert continued((*LAUNCH, "--devices=1", "--"), family, "--mesh=data=2") == alone
    assert continued((*LAUNCH, "--devices=1", "--"), family, "--mesh=model=2") == alone
