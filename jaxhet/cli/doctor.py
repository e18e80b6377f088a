"""`jaxhet doctor`: what this machine and job can use, and why not more."""

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from jaxhet._errors import UsageError

if TYPE_CHECKING:
    from jaxhet._doctor.report import Report
    from jaxhet._job.proofs import Qualification

_WIDTH = 100  # width of text in a file


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet doctor`; `jaxhet doctor --help` explains each."""

    peer: str | None = None
    qualify: bool = False
    coordinator: str | None = None
    process_id: int | None = None
    num_processes: int | None = None
    report: pathlib.Path = pathlib.Path("jaxhet-qualify.json")
    json: bool = False


def doctor(options: Options) -> int:
    """Prints a report; returns the exit code: 0 if all that is needed works, else 1.

    Raises:
      UsageError: an option, here or in the environment, is not valid.
      JaxhetError: with `qualify`, the job could not be set up, or a process died.
    """
    if options.qualify:
        return _qualify(options)
    for name in ("coordinator", "process_id", "num_processes", "report"):
        if getattr(options, name) != getattr(Options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is of use with --qualify only; give both")
    from jaxhet._doctor import text  # and with them JAX
    from jaxhet._doctor.collect import collect

    report = collect(options.peer)
    if options.json:
        print(_json(report), end="")
    else:
        text.show(report, _console())
    return 0 if report.ok else 1


def _qualify(options: Options) -> int:
    """Takes part in the job; process 0 prints the report and writes it."""
    folder = options.report.absolute().parent
    if not folder.is_dir():
        raise UsageError(
            f"can't write {options.report}: no folder {folder}; choose another --report"
        )
    from jaxhet._doctor import text
    from jaxhet._doctor.qualify import qualify

    arguments = {
        "coordinator_address": options.coordinator,
        "process_id": options.process_id,
        "num_processes": options.num_processes,
    }
    process, found = qualify(arguments)
    if process == 0:
        _write(options.report, _json(found))
        if options.json:
            print(_json(found), end="")
        else:
            text.show_proofs(found, _console())
            print(f"written to {options.report}")
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
