"""The command line: the commands, and the options of those that start programs."""

import os
import sys
from typing import Annotated, Any

import typer

from jaxhet._errors import JaxhetError
from jaxhet.cli import coordinator as _coordinator
from jaxhet.cli import doctor as _doctor
from jaxhet.cli import launch as _launch
from jaxhet.cli import plan as _plan
from jaxhet.cli import run as _run
from jaxhet.cli import trace as _trace

_app = typer.Typer(
    name="jaxhet", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
_DEFAULTS = _launch.Options()


def _sizes(text: str) -> tuple[int, ...]:
    """One number, or one for each island."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"{text!r} is not a number above 0, or a list like 1,3")
    return sizes


def _island_variable(text: str) -> tuple[str, str, str]:
    """Island, name and value."""
    island, colon, variable = text.partition(":")
    name, equals, value = variable.partition("=")
    if not (island and colon and name and equals):
        raise typer.BadParameter(
            f"{text!r} is not of the form ISLAND:NAME=VALUE", param_hint="--island-env"
        )
    return island.strip(), name, value


@_app.callback()
def _commands() -> None:
    """One JAX program across islands of NVIDIA and AMD GPUs."""


@_app.command(context_settings={"allow_interspersed_args": False})
def launch(  # noqa: PLR0913 (one parameter an option: typer reads them)
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="command of every process")
    ],
    island_env: Annotated[
        list[str],
        typer.Option(
            metavar="ISLAND:NAME=VALUE",
            help="an environment variable of the processes of one island; may be given many times",
            default_factory=list,
            show_default=False,
        ),
    ],
    islands: Annotated[int, typer.Option(min=1, help="number of islands")] = _DEFAULTS.islands,
    processes_per_island: Annotated[
        Any,
        typer.Option(
            parser=_sizes,
            metavar="N,...",
            help="JAX processes of each island: one number, or one for each island",
        ),
    ] = "1",
    devices: Annotated[
        Any,
        typer.Option(
            parser=_sizes,
            metavar="N,...",
            help="devices of each process: one number, or one for each island; GPUs (default: an"
            " equal share of the visible GPUs), or virtual CPU devices if JAX has no GPU (default:"
            " what the program or XLA_FLAGS says, else 1)",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of the coordinator; 0: a free one")
    ] = _DEFAULTS.port,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="seconds after a failure or a signal until the other processes are stopped;"
            " default: 15, and no limit for a process that knows of the failure of its job",
            show_default=False,
        ),
    ] = None,
    island_names: Annotated[
        str, typer.Option(metavar="NAME,...", help="names of the islands; default island0,...")
    ] = "",
    join: _run.Join = False,
) -> None:
    """Run COMMAND as the processes of a job of several islands on this machine.

    A program that uses JAX without having joined the job fails, unless --join joins for it.

    Output is prefixed by island and process. When a process fails, the others are stopped, and
    the exit code is that of the first failure (128 + signal for a signal).
    """
    options = _launch.Options(
        islands=islands,
        processes_per_island=processes_per_island,
        devices=devices or (),
        port=port,
        grace_s=grace,
        island_names=tuple(name.strip() for name in island_names.split(",") if name.strip()),
        island_env=tuple(map(_island_variable, island_env)),
        join=join,
    )
    raise typer.Exit(_launch.launch(command, options))


_app.command(context_settings={"allow_interspersed_args": False})(_run.run)
for _command in (_coordinator.coordinator, _plan.plan, _doctor.doctor, _trace.trace):
    _app.command()(_command)


def main() -> None:
    """Runs the command `jaxhet`. Errors of jaxhet are one line and exit code 2."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        _app()
    except JaxhetError as error:
        print(f"jaxhet.{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
