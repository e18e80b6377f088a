"""`jaxhet run`: what it starts, and what it refuses to start."""

import pathlib
import subprocess
import sys

import pytest

from jaxhet import _auto
from jaxhet._errors import UsageError
from jaxhet.cli import run
from tests.support.commands import python


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "jaxhet.cli", "run", *arguments, exit_code=None)


def test_program_is_started_with_the_options_in_its_environment(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "print({k: v for k, v in sorted(os.environ.items()) if k.startswith('JAXHET')})\n"
        "print(sys.argv[1:], [type(f).__module__ for f in sys.meta_path][0])\n"
        "sys.exit(3)\n"
    )
    options = ["--island", "amd", "--coordinator", "nv0:7000", "--num-processes", "2"]
    ended = _run(*options, "--process-id", "1", "--", sys.executable, str(script), "--flag", "x")
    assert ended.returncode == 3, ended.stderr
    environ, rest = ended.stdout.splitlines()
    assert eval(environ) == {
        "JAXHET_AUTO": "1",
        "JAXHET_COORDINATOR_ADDRESS": "nv0:7000",
        "JAXHET_ISLAND": "amd",
        "JAXHET_NUM_PROCESSES": "2",
        "JAXHET_PROCESS_ID": "1",
    }
    assert rest == "['--flag', 'x'] jaxhet._auto"


def test_program_that_does_not_exist_is_named() -> None:
    ended = _run("--", "no-such-program")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no command 'no-such-program'; name a program that exists after --" in ended.stderr


def test_value_that_is_not_valid_is_one_line() -> None:
    ended = _run("--process-id", "-1", "--", sys.executable, "-c", "print('started')")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "JAXHET_PROCESS_ID" in ended.stderr


def test_missing_secret_is_said_and_not_jaxs_missing_address() -> None:
    options = ("--coordinator", "127.0.0.1:7100", "--num-processes", "2", "--process-id", "0")
    script = "import jax; jax.distributed.initialize()"
    ended = _run(*options, "--", sys.executable, "-c", script)
    assert ended.returncode == 1
    assert "no job secret: " in ended.stderr


def test_start_file_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_auto, "START_FILE", "not_there.pth")
    with pytest.raises(UsageError, match="install jaxhet with pip into this environment"):
        run.run([sys.executable])


def test_options_win_over_the_environment() -> None:
    environ = run.environment({"JAXHET_ISLAND": "amd"}, {"JAXHET_ISLAND": "x", "PATH": "p"})
    assert environ == {"JAXHET_ISLAND": "amd", "PATH": "p", "JAXHET_AUTO": "1"}
    parent = {"JAXHET_AUTO": "1", "JAXHET_PROGRAM_PID": "7", "JAXHET_PARENT_JOB": "nv0:1"}
    assert run.environment({"JAXHET_AUTO": "join"}, parent) == {"JAXHET_AUTO": "join"}


def test_python_without_auto_does_not_load_jaxhet() -> None:
    script = "import sys; print([name for name in sys.modules if name == 'jaxhet'])"
    assert python("-c", script).stdout == "[]\n"
