"""`jaxhet doctor`: what this machine and job can use, and why not more."""

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxhet._errors import UsageError

if TYPE_CHECKING:
    from jaxhet._doctor.report import Report
    from jaxhet._job.proofs import Qualification

_WIDTH = 100  # width of text in a file
_REPORT = pathlib.Path("jaxhet-qualify.json")


def doctor(
    qualify: Annotated[
        bool, typer.Option(help="prove the transports between the processes of a job")
    ] = False,
    report: Annotated[
        pathlib.Path, typer.Option(help="file in which process 0 writes the proofs, as JSON")
    ] = _REPORT,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """List the usable parts of this machine, and why other parts are not usable.

    The exit code is 0 if everything that a job needs works, 1 if a line says "error", and 2 if the
    answer could not be found. Start --qualify as a process of a job on every host, by jaxhet run or
    jaxhet launch; its exit code is 0 if every pair of processes has a proven transport and no
    transport failed.
    """
    if qualify:
        raise typer.Exit(_qualify(report, as_json=as_json))
    if report != _REPORT:
        raise UsageError("--report is of use with --qualify only; give both")
    from jaxhet._doctor import text  # imports JAX
    from jaxhet._doctor.collect import collect

    found = collect()
    if as_json:
        print(_json(found), end="")
    else:
        text.show(found, _console())
    raise typer.Exit(0 if found.ok else 1)


def _qualify(report: pathlib.Path, *, as_json: bool) -> int:
    """Takes part in the job; process 0 prints the report and writes it."""
    folder = report.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"can't write {report}: no folder {folder}; choose another --report")
    from jaxhet._doctor import text
    from jaxhet._doctor.qualify import qualify

    process, found = qualify()
    if process == 0:
        _write(report, _json(found))
        if as_json:
            print(_json(found), end="")
        else:
            text.show_proofs(found, _console())
            print(f"written to {report}")
    return 0 if found.ok else 1


def _write(path: pathlib.Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}; choose another --report") from None


def _json(found: "Report | Qualification") -> str:
    return json.dumps(dataclasses.asdict(found), indent=2) + "\n"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
