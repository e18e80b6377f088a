"""The commands of the tutorials, with the output that the pages show.

The program of the first tutorial is the README's, which tests/python/test_project.py runs.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.python.compiler.install_plugins import PLUGINS

_ROOT = pathlib.Path(__file__).parents[2]
_TUTORIALS = _ROOT / "docs" / "tutorials"
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks(page: str, info: str) -> list[str]:
    """The fenced blocks of a tutorial whose first line has these words after the fence."""
    fences = _FENCE.findall((_TUTORIALS / page).read_text())
    return [text for words, text in fences if words == info]


def _run(
    command: str, folder: pathlib.Path, packages: pathlib.Path = _ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command line that begins with `jaxhet`, with a further folder of packages."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "jaxhet"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_FLAGS"))}
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), kept["PATH"]])
    return subprocess.run(
        [sys.executable, "-m", "jaxhet.cli", *arguments],
        cwd=folder,
        env={**kept, "PATH": path, "PYTHONPATH": f"{_ROOT}{os.pathsep}{packages}", **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_plan_of_the_tutorial_is_printed(tmp_path: pathlib.Path) -> None:
    if not PLUGINS.exists():
        pytest.skip(f"{PLUGINS} is missing: python tests/python/compiler/install_plugins.py")
    page = "03-read-a-plan.md"
    folder = tmp_path / "demo"
    folder.mkdir()
    (program,) = _blocks(page, 'python title="example.py"')
    (folder / "example.py").write_text(program)
    (shown,) = _blocks(page, "")
    command, _, output = shown.removeprefix("$ ").partition("\n")
    result = _run(command, folder, PLUGINS)
    assert result.returncode == 0, result.stderr
    assert [line.rstrip() for line in result.stdout.splitlines()] == output.splitlines()


@pytest.mark.slow
def test_training_of_the_tutorial_runs_and_resumes(tmp_path: pathlib.Path) -> None:
    *_, command = _blocks("04-parallelism.md", "")
    for _ in range(2):
        result = _run(command.replace("runs/tutorial", str(tmp_path / "run")), _ROOT)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.slow
def test_program_of_two_vendors_trains_on_islands_of_cpus(tmp_path: pathlib.Path) -> None:
    page = "02-nvidia-and-amd.md"
    (program,) = _blocks(page, "python")
    (tmp_path / "train.py").write_text(program)
    (command,) = (text for text in _blocks(page, "") if text.startswith("JAX_PLATFORMS=cpu "))
    result = _run(command.removeprefix("JAX_PLATFORMS=cpu "), tmp_path, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^\[island0/0\] step (\d+): loss (\S+)$", result.stdout, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(0, 100, 10))
    losses = [float(value) for _, value in lines]
    assert losses == sorted(losses, reverse=True)
