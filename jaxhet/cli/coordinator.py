"""`jaxhet coordinator`: the coordinator of one job as a service."""

import os
import sys
from typing import Annotated

import typer

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._job import coordinator as _coordinator
from jaxhet._job.coordinator import Terms
from jaxhet._net.addresses import listen
from jaxhet._net.secret import read_secret


def coordinator(
    bind: Annotated[
        str,
        typer.Option(metavar="ADDRESS:PORT", help="address to listen on; 0.0.0.0 or [::]: all"),
    ],
    islands: Annotated[
        str,
        typer.Option(
            metavar="NAME=N,...",
            help="islands in the order of process ids, with their numbers of processes",
        ),
    ],
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="name or address by which processes reach the coordinator; default: the address"
            " that each process connected to",
        ),
    ] = None,
) -> None:
    """Serve one job: collect its processes, check that they agree, report failures.

    Processes need its address in JAXHET_COORDINATOR_ADDRESS, JAXHET_LAUNCHED=1, and the same
    secret as the coordinator in JAXHET_JOB_SECRET or JAXHET_JOB_SECRET_FILE. Processes that know
    their JAXHET_ISLAND and JAXHET_ISLAND_PROCESS_ID are given process ids. The command reads no
    stdin, is ready when its port answers, and ends with the job. The exit code is 0 if every
    process said goodbye, else 1.
    """
    config = _config.resolve()
    secret = read_secret(config)
    os.environ.pop("JAXHET_JOB_SECRET", None)
    os.environ.update({k: v for k, v in _coordinator.QUIET.items() if k not in os.environ})
    names = tuple(part.strip() for part in islands.split(",") if part.strip())
    agreed = terms(names, advertise, config.connect_timeout_s)
    server = _coordinator.Coordinator(listen(bind), secret, agreed)
    _say(f"listens on {bind} for the {agreed.num_processes} processes of a job")
    server.serve()
    if server.failure:
        _say(f"the job has failed: {server.failure}")
        raise typer.Exit(1)
    _say("the job has ended")


def terms(islands: tuple[str, ...], advertise: str | None, timeout_s: float) -> Terms:
    """Size and islands that the coordinator requires.

    Raises:
      UsageError: The islands have no numbers of processes.
    """
    sizes = announced.sizes(islands)
    if not sizes:
        raise UsageError(
            f"--islands {','.join(islands)} has no numbers of processes: write"
            " NAME=PROCESSES,…, as in nvidia=4,amd=2"
        )
    return Terms(sum(sizes.values()), timeout_s, sizes, advertise)


def _say(text: str) -> None:
    print(f"jaxhet coordinator: {text}", file=sys.stderr, flush=True)
