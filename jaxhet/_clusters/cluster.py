"""Interface of the schedulers' modules, and helpers that read environment variables."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._vendors import VENDORS

Environ = Mapping[str, str]
# Processes can't agree on a port beforehand. As in JAX, they derive one from a number of the job.
_NUM_PORTS = 1 << 12
_FIRST_PORT = 65536 - _NUM_PORTS
_PORT = "JAX_COORDINATOR_PORT"
_VISIBLE_GPUS = [name for v in VENDORS for name in (v.visible, v.visible_below) if name]


Found = dict[str, Any]  # values by option


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A scheduler whose processes know their job by environment variables.

    Attributes:
      name: Value of `cluster_detection_method` that selects this scheduler.
      title: Name of the scheduler in messages.
      variables: Environment variables that all its processes have.
      find: Reads the variables of this process. Raises UsageError where they contradict each
        other.
    """

    name: str
    title: str
    variables: tuple[str, ...]
    find: Callable[[Environ], Found]

    def is_present(self, environ: Environ) -> bool:
        """Whether this process was started by the scheduler."""
        return all(environ.get(name) for name in self.variables)


def number(environ: Environ, name: str) -> int:
    """Value of a variable that must hold a number of at least 0.

    Raises:
      UsageError: The value is not a number.
    """
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} is not a number; the scheduler sets it, leave it alone")
    return int(text)


def numbers(environ: Environ, name: str, separator: str | None = None) -> list[int]:
    """A variable that holds several numbers."""
    parts = environ.get(name, "").split(separator)
    return [number({name: part.strip()}, name) for part in parts]


def address(environ: Environ, host: str, default_port: int) -> str:
    """The coordinator's address on a host; JAX's variable of the port wins over the default."""
    port = number(environ, _PORT) if environ.get(_PORT) else default_port
    return f"{host}:{port}"


def port_of(job: int) -> int:
    """The port of a job with this number."""
    return _FIRST_PORT + job % _NUM_PORTS


def own_gpu(environ: Environ, local_rank: str, processes_here: int) -> Found:
    """One GPU for each process, where a host runs several and each sees all GPUs.

    JAX gives a process that is alone on its host the first GPU only; here it has all.
    """
    bound = any(name in environ and "," not in environ[name] for name in _VISIBLE_GPUS)
    if processes_here < 2 or bound:
        return {}
    return {"local_device_ids": (number(environ, local_rank),)}


def in_island(sizes: Mapping[str, int], island: str, index: int) -> Found:
    """Options of a process that knows all islands and its own place in one."""
    return {
        "islands": tuple(announced.text(sizes).split(",")),
        "island": island,
        "island_process_id": index,
        "num_processes": sum(sizes.values()),
        "process_id": announced.process_id(sizes, island, index),
    }
