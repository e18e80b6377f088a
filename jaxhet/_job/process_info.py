"""How the processes of a job describe themselves, and whether two of them agree."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxhet._errors import TransportError
from jaxhet._jax import compiler_settings
from jaxhet._json import decode
from jaxhet._net.interfaces import Interface

JOB_BYTES = 8  # length of a job's id
PLUGIN = "plugin"  # name of a GPU plugin's package and version among the versions
_EFFECT_OF_FLAGS = "results of equal computations may differ in their last bits"
_EFFECT_OF_JAX_CONFIG = (
    "equal functions may become different programs, with different results or a PlanMismatchError"
)


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """First message of a process: its place in the job."""

    process: int  # UNASSIGNED: the coordinator gives it out
    num_processes: int  # UNASSIGNED: the coordinator knows it
    island: str
    is_declared: bool  # the island, rather than taken from the platform
    islands: tuple[str, ...]
    platform: str
    topology: tuple[str, str]  # the plugin's names in keys, from `compat.local_topology_key`
    has_cpu: bool  # JAX creates a CPU backend, alone or beside the platform's
    host: str
    host_id: str
    pid: int
    address: str  # host:port that peers connect to
    versions: dict[str, str]
    options: dict[str, Any]  # options that must be equal in the whole job
    settings: dict[str, str]  # `compiler_settings.settings()`: they must be equal in an island
    island_process: int | None  # index in the island, of a process without an id
    interfaces: tuple[str, ...]  # for data connections; see `Interface.announced`
    partition_index: int | None  # JAX's partition that the user gives this process
    gpus: tuple[str, ...]  # models of the process's own, as the driver names them

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ProcessInfo":
        """The description in a message; lists become tuples again.

        Raises:
          TransportError: A field is missing, unknown or of another type.
        """
        try:
            info = decode(cls, fields, "a process's description")
        except ValueError as error:
            raise TransportError(str(error)) from None
        for text in info.interfaces:
            Interface.parse(text)
        return info

    def __str__(self) -> str:
        number = f"{self.island_process} of its island" if self.process < 0 else self.process
        return f"process {number} ({self.island}, pid {self.pid} on {self.host})"


def disagreement(ours: ProcessInfo, theirs: ProcessInfo) -> str | None:
    """Says why two processes can't be in one job, or None. Pure."""
    pairs = [
        ("num_processes", ours.num_processes, theirs.num_processes),
        ("the set of islands", sorted(ours.islands), sorted(theirs.islands)),
        *_versions(ours, theirs),
        *((f"option {k}", v, theirs.options.get(k)) for k, v in ours.options.items()),
    ]
    for what, mine, other in pairs:
        if mine != other:
            return (
                f"{what} differs: {ours} has {mine!r}, {theirs} has {other!r}; start every process"
                " of the job with the same value"
            )
    if ours.is_declared != theirs.is_declared:
        declared, other = (ours, theirs) if ours.is_declared else (theirs, ours)
        return (
            f"{declared} declares its island and {other} does not: its island would be its"
            " platform's; set JAXHET_ISLAND of every process, or of none"
        )
    if ours.island == theirs.island and ours.platform != theirs.platform:
        return (
            f"island {ours.island!r} holds two platforms: {ours} is {ours.platform}, {theirs} is"
            f" {theirs.platform}; give each platform an island of its own"
        )
    return _settings_disagree(ours, theirs) or _backends_disagree(ours, theirs)


def _versions(ours: ProcessInfo, theirs: ProcessInfo) -> list[tuple[str, str, str | None]]:
    """Versions that must be equal in two processes, with both values. Pure.

    Vendors' plugins exist for other patch releases of one JAX, so islands may have different ones.
    """
    pairs = ((name, version, theirs.versions.get(name)) for name, version in ours.versions.items())
    if ours.island == theirs.island:
        return [(f"the version of {name}", mine, other) for name, mine, other in pairs]
    return [
        (f"the version of {name}", _release(mine), _release(other or ""))
        for name, mine, other in pairs
        if name != PLUGIN
    ]


def _release(version: str) -> str:
    """The first three numbers of a version, which decide what a program means. Pure."""
    return ".".join(version.split(".")[:3])


def differences_between_islands(members: Sequence[ProcessInfo]) -> list[str]:
    """Returns the differences of islands from the first island, a line each. Pure.

    The first island is the one of the smallest process id. Within an island, settings and versions
    are equal.
    """
    of_island: dict[str, ProcessInfo] = {}
    for info in sorted(members, key=lambda info: info.process):
        of_island.setdefault(info.island, info)
    first, *others = of_island.values()
    lines = (f(first, other) for other in others for f in (_version_line, _settings_line))
    return [line for line in lines if line]


def _version_line(first: ProcessInfo, other: ProcessInfo) -> str:
    """Returns the line for an `other` island with another patch release of JAX, or "". Pure."""
    if all(first.versions.get(name) == other.versions.get(name) for name in ("jax", "jaxlib")):
        return ""
    each = (
        f"{info.island} has {', '.join(f'{name} {v}' for name, v in info.versions.items())}"
        for info in (first, other)
    )
    return f"{'; '.join(each)}: islands may have different patch releases"


def _settings_line(first: ProcessInfo, other: ProcessInfo) -> str:
    """Returns the line for the island of `other`, or "" if its settings are equal. Pure."""
    found = compiler_settings.differences(first.settings, other.settings)
    if not found:
        return ""
    each = (f"in {name}: {theirs}, {ours} in {first.island}" for name, ours, theirs in found)
    only_flags = all(name.startswith(compiler_settings.XLA_FLAGS) for name, _, _ in found)
    effect = _EFFECT_OF_FLAGS if only_flags else _EFFECT_OF_JAX_CONFIG
    return f"island {other.island} differs from {first.island} {'; '.join(each)}; {effect}"


def _settings_disagree(ours: ProcessInfo, theirs: ProcessInfo) -> str | None:
    """Says why two processes of one island would compile different programs, or None. Pure."""
    found = compiler_settings.differences(ours.settings, theirs.settings)
    if ours.island != theirs.island or not found:
        return None
    name, mine, other = found[0]
    return (
        f"{name} differs within island {ours.island!r}: {mine} in {ours}, {other} in {theirs};"
        " start all processes of an island with the same value"
    )


def _backends_disagree(ours: ProcessInfo, theirs: ProcessInfo) -> str | None:
    """Says why the backends of two processes would wait for each other for ever, or None. Pure."""
    if (ours.platform == "cpu") != (theirs.platform == "cpu"):
        return (
            f"{ours} is on {ours.platform} and {theirs} on {theirs.platform}: a job has CPUs or"
            " GPUs; set JAX_PLATFORMS of every process to its platform"
        )
    if ours.has_cpu != theirs.has_cpu:
        has, has_not = (ours, theirs) if ours.has_cpu else (theirs, ours)
        return (
            f"{has} has a CPU backend beside its GPUs, and {has_not} has none; set JAX_PLATFORMS of"
            " every process to its GPUs' platform, or of none"
        )
    return None
