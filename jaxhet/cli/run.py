"""`jaxhet run`: an unmodified JAX program as a process of a job."""

import dataclasses
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import NoReturn

from jaxhet import _auto, _config
from jaxhet._errors import UsageError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet run`; `jaxhet run --help` explains each."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    island: str | None = None
    secret_file: pathlib.Path | None = None
    join: bool = False


# Option of the command -> that of jaxhet.
_VARIABLES = {
    "coordinator": "JAXHET_COORDINATOR_ADDRESS",
    "num_processes": "JAXHET_NUM_PROCESSES",
    "process_id": "JAXHET_PROCESS_ID",
    "island": "JAXHET_ISLAND",
    "secret_file": "JAXHET_JOB_SECRET_FILE",
}


def run(command: list[str], options: Options) -> NoReturn:
    """Becomes `command`, whose `jax.distributed.initialize` joins the job.

    Raises:
      UsageError: no such command, a value that is not valid, or a Python that would not know of
        jaxhet.
    """
    variables = environment(options, os.environ)
    _config.resolve(environ=variables)
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"no command {command[0]!r}; name a program that exists after --")
    _check_start_file(command)
    sys.stdout.flush()
    os.execve(program, command, variables)


def environment(options: Options, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program: `base`, and what the options say."""
    values = {name: getattr(options, name) for name in _VARIABLES}
    given = {_VARIABLES[name]: str(value) for name, value in values.items() if value is not None}
    auto = {"JAXHET_AUTO": "join"} if options.join else {}
    return {"JAXHET_AUTO": "1", **_config.for_new_job(base), **given, **auto}


def _check_start_file(command: list[str]) -> None:
    if not _auto.is_installed():
        raise UsageError(
            f"{_auto.START_FILE} is not in site-packages of {sys.executable}, so programs would not"
            " join the job: install jaxhet with pip into this environment (`make setup` in a"
            " checkout)"
        )
    flags = _interpreter_flags(command)
    if any("S" in flag for flag in flags):
        raise UsageError(
            f"{command[0]} {' '.join(flags)} starts without site-packages, so the program would not"
            " join the job; leave -S out"
        )


def _interpreter_flags(command: list[str]) -> list[str]:
    """Short flags of Python itself, as in `python -u -S script.py`."""
    if not pathlib.Path(command[0]).name.startswith("python"):
        return []
    flags = []
    for argument in command[1:]:
        if not argument.startswith("-") or argument.startswith("--") or argument[1:2] in "cmWX":
            break
        flags.append(argument)
    return flags
