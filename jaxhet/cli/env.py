"""`jaxhet env`: this process's place in a job according to the environment, and the sources."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxhet import _clusters, _config
from jaxhet._errors import UsageError
from jaxhet._job import place
from jaxhet._net.addresses import split_address
from jaxhet._net.secret import read_secret

_SHOWN = (
    "coordinator_address",
    "coordinator_bind_address",
    "num_processes",
    "process_id",
    "island",
    "island_process_id",
    "islands",
    "launched",
    "local_device_ids",
    "partition_index",
)
_SECRETS = ("job_secret", "job_secret_file")
_WIDTH = 100  # width of text in a file


@dataclasses.dataclass(frozen=True)
class Environment:
    """Options of this process, and the source of each.

    Attributes:
      scheduler: Name of the scheduler in messages; "" without a scheduler.
      values: Value of each option and its source.
      missing: Options that are missing, each with a hint how to give it.
      problem: An error that `jaxhet.initialize` would raise, or "".
      hints: Sentences about schedulers whose variables are incomplete.
    """

    scheduler: str
    values: dict[str, tuple[Any, str]]
    missing: dict[str, str]
    problem: str
    hints: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether `jaxhet.initialize` without arguments could ask the coordinator."""
        return not self.missing and not self.problem


def look(environ: Mapping[str, str]) -> Environment:
    """Looks at an environment, and at the file of the secret.

    Raises:
      UsageError: A value is not valid, or variables contradict each other.
    """
    config, detected = _clusters.resolve({}, environ)
    options = {option.name: option for option in _config.TABLE}
    values: dict[str, tuple[Any, str]] = {}
    for name in _SHOWN:
        if name in config.given:
            values[name] = (getattr(config, name), options[name].env)
        elif name in detected.found:
            values[name] = (detected.found[name].value, detected.found[name].source)
    missing, problem = place.missing(config), ""
    if not missing:
        problem = _derive(config, values)
    if not problem:
        problem = _refusal(config)
    values |= {name: ("set", options[name].env) for name in _SECRETS if getattr(config, name)}
    if not values.keys() & set(_SECRETS):
        missing["job_secret"] = (
            "set JAXHET_JOB_SECRET_FILE to a file that all processes of the job have, and nobody"
            " else can read; `jaxhet launch` makes a secret by itself"
        )
    return Environment(detected.title, values, missing, problem, detected.hints)


def _refusal(config: _config.Config) -> str:
    """An error of the secret or the address that `jaxhet.initialize` would raise, or ""."""
    try:
        if config.job_secret or config.job_secret_file:
            read_secret(config)
        if config.coordinator_address:
            split_address(config.coordinator_address, "coordinator_address")
    except UsageError as error:
        return str(error)
    return ""


def _derive(config: _config.Config, values: dict[str, tuple[Any, str]]) -> str:
    """Adds the options that follow from the others; returns an error in words, or ""."""
    try:
        derived = place.complete(config)
    except UsageError as error:
        return str(error)
    for name in ("num_processes", "process_id"):
        value = getattr(derived, name)
        if name not in values:
            values[name] = ("", "the coordinator") if value is None else (value, "islands")
    return ""


def env(
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Print this process's place in a job according to the environment, and the sources.

    Sources are JAXHET_*, JAX's own variables, and the variables of Slurm, Open MPI, MPICH, JobSet,
    Volcano and Indexed Jobs of Kubernetes. The exit code is 0 if jaxhet.initialize needs nothing
    more, else 1.
    """
    found = look(os.environ)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _show(found, Console(width=None if os.isatty(1) else _WIDTH, highlight=False))
    raise typer.Exit(0 if found.is_complete else 1)


def _show(found: Environment, console: Console) -> None:
    console.print(f"started by {found.scheduler or 'no scheduler that jaxhet knows'}")
    table = Table("option", "value", "from", box=None, pad_edge=False)
    for name, (value, source) in found.values.items():
        table.add_row(name, Text(_text(value)), Text(source))
    for name, how in found.missing.items():
        table.add_row(name, "missing", Text(how))
    console.print(table)
    for line in filter(None, (found.problem, *found.hints)):
        console.print(line, markup=False)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
