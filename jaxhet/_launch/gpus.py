"""Which of a machine's GPUs each process of a job gets. Loads no driver."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jaxhet._errors import UsageError
from jaxhet._jax import jaxlib
from jaxhet._vendors import BY_PLATFORM


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs of one vendor that a job may use.

    Attributes:
      platform: JAX's name of their platform.
      names: Their names in the environment variable that shows them to a process.
    """

    platform: str
    names: tuple[str, ...]

    @property
    def variable(self) -> str:
        """The environment variable that shows them to a process."""
        return BY_PLATFORM[self.platform].visible

    def environment(self, mine: Sequence[str]) -> dict[str, str]:
        """Variables that give a process its own GPUs, listed first, and show it the others.

        A process reads another GPU's memory at the full rate of the link only if it sees that GPU.
        """
        others = dict.fromkeys(name for name in self.names if name not in mine)
        return {
            self.variable: ",".join((*mine, *others)),
            "JAXHET_LOCAL_DEVICE_IDS": ",".join(map(str, range(len(mine)))),
        }


def find(environ: Mapping[str, str]) -> Gpus | None:
    """The GPUs that processes with this environment would share, or None if they use CPUs."""
    platform = jaxlib.installed_platform(environ.get("JAX_PLATFORMS"))
    if platform not in BY_PLATFORM:
        return None
    return visible(platform, environ, jaxlib.count_gpus(platform))


def visible(platform: str, environ: Mapping[str, str], count: int) -> Gpus:
    """The GPUs of a machine with `count` of them that the user has left visible. Pure."""
    vendor = BY_PLATFORM[platform]
    if vendor.visible in environ:
        return Gpus(platform, _listed(environ[vendor.visible]))
    if vendor.visible_below in environ:
        count = len(_listed(environ[vendor.visible_below]))
    return Gpus(platform, tuple(map(str, range(count))))


def share(gpus: Gpus, wanted: Sequence[int] | None, num_processes: int) -> list[tuple[str, ...]]:
    """Divides the GPUs among the processes: as many as each wants, or equal shares. Pure.

    Raises:
      UsageError: there are too few GPUs.
    """
    have = len(gpus.names)
    wanted = wanted or [max(1, have // num_processes)] * num_processes
    if sum(wanted) > have:
        raise UsageError(
            f"{num_processes} processes need {sum(wanted)} GPUs ({'+'.join(map(str, wanted))}), and"
            f" {have} are visible ({gpus.variable}={','.join(gpus.names)}); ask for fewer with"
            " --devices or --processes-per-island, or set JAX_PLATFORMS=cpu"
        )
    ends = itertools.accumulate(wanted)
    return [gpus.names[end - size : end] for size, end in zip(wanted, ends, strict=True)]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
