"""The file of `jaxhet launch --hosts`: which processes run on which hosts."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from jaxhet._errors import UsageError
from jaxhet._json import decode


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
    env: dict[str, str | int | float] = dataclasses.field(default_factory=dict)


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
    ssh: tuple[str | int, ...] = ()
    env: dict[str, str | int | float] = dataclasses.field(default_factory=dict)

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
            {k: str(v) for k, v in {**cluster.env, **host.env, **island_envs[host.island]}.items()},
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
    try:
        cluster: Cluster = decode(Cluster, content, str(path))
    except ValueError as error:
        raise UsageError(f"--hosts {path}: {error}") from None
    _check(path, cluster)
    return cluster


def _check(path: pathlib.Path, cluster: Cluster) -> None:
    """Checks what types do not say.

    Raises:
      UsageError: An entry is wrong.
    """
    if not cluster.hosts:
        raise UsageError(f"{path}: hosts is empty; name at least one host")
    names = [cluster.coordinator, *(name for h in cluster.hosts for name in (h.island, h.host))]
    for name in names:  # ssh must not read one as an option
        if name is not None and (name.startswith("-") or name.split() != [name]):
            raise UsageError(
                f"{path}: {name!r} is not a name without blanks that does not begin with -"
            )
    for i, host in enumerate(cluster.hosts):
        where = f"{path}: entry {i} of hosts"
        if min(host.processes, 1 if host.devices is None else host.devices) < 1:
            raise UsageError(f"{where} has a number of processes or devices below 1")
        if host.host is None and host.python != Host.python:
            raise UsageError(
                f"{where} has python, which is for hosts that ssh reaches, and no host"
            )
