"""Which of a machine's GPUs each process of a job gets. Loads no driver."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from jaxhet import _jax_compat
from jaxhet._errors import UsageError

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
_BELOW_HIP = "ROCR_VISIBLE_DEVICES"  # HIP numbers what this leaves


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs of one vendor that a job may use.

    Attributes:
      variable: The environment variable by which a process is shown some of them.
      names: As they stand in it.
    """

    variable: str
    names: tuple[str, ...]


def find(environ: Mapping[str, str]) -> Gpus | None:
    """The GPUs that processes with this environment would share, or None if they use CPUs."""
    platform = _jax_compat.installed_platform(environ.get("JAX_PLATFORMS"))
    if platform not in _VISIBLE:
        return None
    return visible(platform, environ, _jax_compat.count_gpus(platform))


def visible(platform: str, environ: Mapping[str, str], count: int) -> Gpus:
    """The GPUs of a machine with `count` of them that the user has left visible. Pure."""
    variable = _VISIBLE[platform]
    if variable in environ:
        return Gpus(variable, _listed(environ[variable]))
    if platform == "rocm" and _BELOW_HIP in environ:
        count = len(_listed(environ[_BELOW_HIP]))
    return Gpus(variable, tuple(map(str, range(count))))


def share(gpus: Gpus, wanted: Sequence[int] | None, num_processes: int) -> list[tuple[str, ...]]:
    """Deals the GPUs out: to each process as many as it wants, or an equal share. Pure.

    Raises:
      UsageError: there are not so many.
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
