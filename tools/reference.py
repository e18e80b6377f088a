"""Writes the generated pages of docs/reference anew, from the tables and dataclasses in the code.

`python tools/reference.py` writes them; tests/python/test_docs.py compares them with the code.
"""

import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import typer

from jaxhet import _options
from jaxhet.cli import _main

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from tools import schemas

_FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "reference"
_OPTIONS = """# Options

An option is an argument of `jaxhet.initialize`, by its lower-case name without `JAXHET_`, or an
environment variable. An argument wins over the environment. An invalid value is an error that lists
the valid values, and an unknown `JAXHET_*` variable is a warning. *All processes* marks options
that must have one value in the whole job. *Where unset* names a variable of NCCL that sets the
option then; the log says so.

Four timeouts set all others: a program's first exchange waits six times `JAXHET_DEADLINE_S`, and an
executable of another process twice that time; heartbeats are sent eight times in
`JAXHET_PEER_TIMEOUT_S`; a process that ignores a failure is ended after a tenth of
`JAXHET_EXIT_TIMEOUT_S`.

"""
_CLI = """# Command line

`python -m jaxhet.cli` is the same as `jaxhet`. Every command prints its options with `--help`.
An error of jaxhet is one line and exit code 2; an option that does not exist is shown in a box.

| command | purpose |
|---|---|"""


def pages() -> dict[str, str]:
    """The text of each generated page, by its file name in docs/reference."""
    return {
        "options.md": _OPTIONS + option_table() + "\n",
        "cli.md": "\n".join(_cli()) + "\n",
        **{f"schemas/{name}.json": schemas.text(s) for name, s in schemas.schemas().items()},
    }


def option_table() -> str:
    """The table of options: environment name, default, valid values and meaning."""
    return "\n".join(
        [
            "| environment | default | valid | meaning |",
            "|---|---|---|---|",
            *map(_option, _options.table(_options.Options)),
        ]
    )


def _option(option: _options.Option) -> str:
    meaning = option.help
    if option.nccl:
        meaning += f"; where unset: `{option.nccl}`"
    if option.agreed:
        meaning += "; *all processes*"
    return f"| `{option.env}` | {_default(option.default)} | {_valid(option)} | {meaning} |"


def _valid(option: _options.Option) -> str:
    """The choices or the range of an option."""
    if option.type is bool:
        return "0, 1"
    if option.minimum is None:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.maximum is None:
        return f"{option.minimum:g} or more"
    return f"{option.minimum:g} to {option.maximum:.0f}"


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool | float):
        return f"{value:g}"
    return "" if value is None else str(value)


def commands() -> dict[str, Any]:
    """The commands of `jaxhet` by name."""
    return typer.main.get_command(_main._app).commands  # pyright: ignore


def _cli() -> Iterator[str]:
    """The lines of the page of all commands."""
    yield _CLI
    for name, command in commands().items():
        usage = " ".join(p.metavar for p in command.params if p.param_type_name == "argument")
        yield (
            f"| `jaxhet {name} {usage}".rstrip()
            + f"` | {inspect.cleandoc(command.help).splitlines()[0]} |"
        )


if __name__ == "__main__":
    for name, text in pages().items():
        (_FOLDER / name).write_text(text)
