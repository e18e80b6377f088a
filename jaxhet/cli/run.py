"""`jaxhet run`: an unmodified JAX program as a process of a job."""

import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from jaxhet import _auto, _config
from jaxhet._errors import UsageError

Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="join the job at the program's first use of JAX, for programs that do not call"
        " jax.distributed.initialize",
    ),
]


def run(  # noqa: PLR0913 (one parameter an option: typer reads them)
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="program to run, for example python -m ..."),
    ],
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="address of the job's coordinator")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="processes of the job")] = None,
    process_id: Annotated[int | None, typer.Option(help="this process of the job")] = None,
    island: Annotated[str | None, typer.Option(help="name of this process's island")] = None,
    secret_file: Annotated[
        pathlib.Path | None, typer.Option(help="file with the job secret")
    ] = None,
    join: Join = False,
) -> NoReturn:
    """Run an unmodified JAX program as one process of a job.

    jax.distributed.initialize of the program joins the job, and jax.distributed.shutdown leaves it.
    A program that uses JAX without having joined fails, unless --join joins for it. Options are
    JAXHET_* variables of the same meaning, and win over the environment. The command can follow
    jaxhet launch, srun or mpirun, or be a pod's command. If the environment describes no job of
    jaxhet, JAX's own functions are called.
    """
    given = {
        "JAXHET_COORDINATOR_ADDRESS": coordinator,
        "JAXHET_NUM_PROCESSES": num_processes,
        "JAXHET_PROCESS_ID": process_id,
        "JAXHET_ISLAND": island,
        "JAXHET_JOB_SECRET_FILE": secret_file,
        "JAXHET_AUTO": "join" if join else None,
    }
    variables = environment(given, os.environ)
    _config.resolve(environ=variables)
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"no command {command[0]!r}; name a program that exists after --")
    _check_start_file()
    sys.stdout.flush()
    os.execve(program, command, variables)


def environment(given: Mapping[str, object], base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program: `base`, and the variables that the options give."""
    set_by_options = {name: str(value) for name, value in given.items() if value is not None}
    return {"JAXHET_AUTO": "1", **_config.for_new_job(base), **set_by_options}


def _check_start_file() -> None:
    if not _auto.is_installed():
        raise UsageError(
            f"{_auto.START_FILE} is not in site-packages of {sys.executable}, so programs would not"
            " join the job: install jaxhet with pip into this environment (`make setup` in a"
            " checkout)"
        )
