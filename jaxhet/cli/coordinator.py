"""`jaxhet coordinator`: the coordinator of one job as a service."""

import dataclasses
import os
import sys

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._job import coordinator as _coordinator
from jaxhet._job.terms import Terms
from jaxhet._net.addresses import listen
from jaxhet._net.secret import read_secret


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet coordinator`; `jaxhet coordinator --help` explains each."""

    bind: str
    advertise: str | None = None
    num_processes: int | None = None
    islands: tuple[str, ...] = ()


def serve(options: Options) -> int:
    """Serves one job until it has ended; returns 0 if all of its processes said goodbye, else 1.

    Reads nothing from stdin. The port answers when processes may come.

    Raises:
      UsageError: No secret, no number of processes, or the address can't be used.
    """
    config = _config.resolve()
    secret = read_secret(config)
    os.environ.pop("JAXHET_JOB_SECRET", None)
    os.environ.update({k: v for k, v in _coordinator.QUIET.items() if k not in os.environ})
    agreed = terms(options, config.connect_timeout_s)
    coordinator = _coordinator.Coordinator(listen(options.bind), secret, agreed)
    _say(f"listens on {options.bind} for the {agreed.num_processes} processes of a job")
    coordinator.serve()
    if coordinator.failure:
        _say(f"the job has failed: {coordinator.failure}")
        return 1
    _say("the job has ended")
    return 0


def terms(options: Options, timeout_s: float) -> Terms:
    """Size and islands that the coordinator requires.

    Raises:
      UsageError: The number of processes is not given, or twice with different values.
    """
    sizes = announced.sizes(options.islands)
    total = sum(sizes.values())
    if options.islands and not sizes:
        raise UsageError(
            f"--islands {','.join(options.islands)} has no numbers of processes: write"
            " NAME=PROCESSES,…, as in nvidia=4,amd=2"
        )
    if not total and options.num_processes is None:
        raise UsageError("how many processes has the job? Give --islands or --num-processes")
    if total and options.num_processes not in (None, total):
        raise UsageError(
            f"--num-processes {options.num_processes}, and --islands"
            f" {','.join(options.islands)} has {total}: give one of the two"
        )
    return Terms(total or options.num_processes or 0, timeout_s, sizes, options.advertise)


def _say(text: str) -> None:
    print(f"jaxhet coordinator: {text}", file=sys.stderr, flush=True)
