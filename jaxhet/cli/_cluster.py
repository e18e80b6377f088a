"""The file of `jaxhet launch --hosts`: which processes run on which hosts."""

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxhet._errors import UsageError


@dataclasses.dataclass(frozen=True)
class Host:
    """An entry of `hosts`: the processes of one island on one host.

    Attributes:
      island: Name of the island.
      host: Destination for ssh; None: the launcher's own machine, without ssh.
      processes: Number of processes.
      devices: Devices per process; None: a share of the GPUs, or the program's CPU devices.
      directory: Working directory; None: the login directory of ssh, or the launcher's own.
      python: Interpreter on the host that has jaxhet, relative to `directory`. The folder of the
        interpreter is the first in PATH.
      env: Variables of these processes.
    """

    island: str
    host: str | None = None
    processes: int = 1
    devices: int | None = None
    directory: str | None = None
    python: str = "python3"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts of a job: the content of a cluster file, or this machine alone.

    Attributes:
      coordinator: Address of the launcher's machine that all hosts reach.
      hosts: Entries of the file, in its order.
      ssh: Further arguments of ssh.
      env: Variables of all processes; a host's own variables win.
    """

    coordinator: str
    hosts: tuple[Host, ...]
    ssh: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def islands(self) -> tuple[str, ...]:
        """The names of the islands, in the order of their first hosts."""
        return tuple(dict.fromkeys(host.island for host in self.hosts))


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a process in the job.

    Attributes:
      host: Entry of its host.
      env: Variables of the cluster, the host and the island.
      wanted: Devices of each of the job's processes on the host.
      index: Index of this process in `wanted`.
    """

    host: Host
    env: Mapping[str, str]
    wanted: tuple[int | None, ...]
    index: int


def places(cluster: Cluster, island_envs: Mapping[str, Mapping[str, str]]) -> tuple[Place, ...]:
    """Places of the job's processes, by id. Processes of one island have neighbouring ids.

    Args:
      cluster: The hosts.
      island_envs: Further variables of each island.

    Raises:
      UsageError: The launcher's machine lacks a directory.
    """
    wanted: dict[str | None, list[int | None]] = {}
    found: list[tuple[Host, int]] = []
    for host in cluster.hosts:
        if host.host is None and host.directory is not None and not os.path.isdir(host.directory):
            raise UsageError(f"directory: there is no folder {host.directory!r} on this machine")
        on_host = wanted.setdefault(host.host, [])
        for _ in range(host.processes):
            found.append((host, len(on_host)))
            on_host.append(host.devices)
    found.sort(key=lambda pair: cluster.islands.index(pair[0].island))
    return tuple(
        Place(
            host,
            {**cluster.env, **host.env, **island_envs[host.island]},
            tuple(wanted[host.host]),
            index,
        )
        for host, index in found
    )


def read(path: pathlib.Path) -> Cluster:
    """Reads the file.

    Raises:
      UsageError: It can't be read, is not YAML, or an entry is wrong; the text names the entry.
    """
    import yaml  # 20 ms, that a job on one machine does not need

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"--hosts {path} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--hosts {path} is not YAML: {' '.join(str(error).split())}") from None
    fields = _fields(content, str(path), _CLUSTER, ("coordinator", "hosts"))
    hosts = tuple(
        Host(**_fields(entry, f"{path}: hosts[{i}]", _HOST, ("island",)))
        for i, entry in enumerate(fields.pop("hosts"))
    )
    if not hosts:
        raise UsageError(f"{path}: hosts is empty; name at least one host")
    for i, host in enumerate(hosts):
        if host.host is None and host.python != Host.python:
            raise UsageError(
                f"{path}: hosts[{i}] has python, which is for hosts that ssh reaches, and no host"
            )
    return Cluster(hosts=hosts, **fields)


def _name(value: Any) -> str:
    """A name that ssh does not read as an option."""
    if not isinstance(value, str) or not value or value[0] == "-" or value.split() != [value]:
        raise ValueError("a name without blanks that does not begin with -")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("a number above 0")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(type(one) in (str, int) for one in value):
        raise ValueError("a list of texts")
    return tuple(map(str, value))


def _variables(value: Any) -> dict[str, str]:
    is_mapping = isinstance(value, dict)
    if not is_mapping or not all(
        isinstance(k, str) and k and "=" not in k and type(v) in (str, int, float)
        for k, v in value.items()
    ):
        raise ValueError("a mapping of names to texts or numbers; put quotes around yes, no and on")
    return {name: str(each) for name, each in value.items()}


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list of hosts")
    return value


_Table = Mapping[str, Callable[[Any], Any]]
_CLUSTER: _Table = {"coordinator": _name, "hosts": _entries, "ssh": _texts, "env": _variables}
_HOST: _Table = {
    "island": _name,
    "host": _name,
    "processes": _count,
    "devices": _count,
    "directory": _text,
    "python": _text,
    "env": _variables,
}


def _fields(found: Any, where: str, table: _Table, required: tuple[str, ...]) -> dict[str, Any]:
    """The values of a mapping, each checked by the table's function for its key."""
    known = ", ".join(table)
    if not isinstance(found, dict):
        raise UsageError(f"{where} is not a mapping; its keys are {known}")
    for key in found:
        if key not in table:
            near = difflib.get_close_matches(str(key), table, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; the keys are {known}"
            raise UsageError(f"{where} has a key {key!r} that means nothing{hint}")
    for key in required:
        if key not in found:
            raise UsageError(f"{where} has no {key}, which it needs")
    checked = {}
    for key, value in found.items():
        try:
            checked[key] = table[key](value)
        except ValueError as error:
            raise UsageError(f"{where}: {key}: {value!r} is not {error}") from None
    return checked
