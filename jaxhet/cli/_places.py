"""Where the processes of a job run."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a process in a job.

    Attributes:
      island: name of the island.
      devices: number of devices; None: the program decides.
      gpus: the environment variables that give the process its GPUs; None: its
        devices are virtual CPU devices.
      env: variables of its island alone.
      directory: working directory; None: the launcher's.
      remote: place on another host, instead of `devices`, `gpus` and `directory`.
    """

    island: str
    devices: int | None
    gpus: Mapping[str, str] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directory: str | None = None
    remote: "RemotePlace | None" = None


@dataclasses.dataclass(frozen=True)
class RemotePlace:
    """A process's place on another host.

    Attributes:
      ssh: the command that reaches `jaxhet._launch.remote` there.
      host: name of the host.
      wanted: devices of each of the job's processes there.
      index: place of this process in `wanted`.
    """

    ssh: tuple[str, ...]
    host: str
    wanted: tuple[int | None, ...]
    index: int
