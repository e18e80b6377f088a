"""The codec of a collective, by its mesh axes.

HLO has groups of devices and no axes. JAX's module has the program's meshes, and lowering writes
them into an attribute. In a mesh, the axes of a collective are those in which members of one group
differ; the axes that count are those among them that lead from one island to another.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from jaxhet._errors import UsageError
from jaxhet.compiler import collectives, hlo
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.options import Job, Options
from jaxhet.compiler.plan import PROGRAM_ATTRIBUTE

# Frontend attribute of a module: JSON, for each mesh its axes as [name, size], outermost first, and
# the logical ids in its order (none: 0, 1 and so on).
MESHES_ATTRIBUTE = f"{PROGRAM_ATTRIBUTE}_meshes"

# Axis of the meshes of `jax.experimental.multihost_utils`, by which JAX copies and compares the
# values of hosts, also in `jax.device_put`: they must be exact.
_OF_HOSTS = "processes"
# Names of JAX's programs that copy an array to another sharding, which must be exact too.
_COPIES = ("jit__device_put_reshard", "jit__identity_fn")
_COMPRESSED = ("all-gather", "all-reduce", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class _Mesh:
    """A mesh of all devices of a program.

    Attributes:
      names: Names of the axes.
      places: Logical id to its indices on the axes.
    """

    names: tuple[str, ...]
    places: np.ndarray

    def crossed(self, groups: Sequence[Sequence[int]], islands: np.ndarray) -> set[str]:
        """Axes in which members of a group differ and that cross islands."""
        varying = {
            axis
            for group in groups
            for axis in range(len(self.names))
            if np.ptp(self.places[list(group), axis])
        }
        return {self.names[axis] for axis in varying if self._crosses(axis, islands)}

    def _crosses(self, axis: int, islands: np.ndarray) -> bool:
        """Whether devices that differ in this axis alone are on several islands."""
        others = np.delete(self.places, axis, axis=1)
        first: dict[bytes, int] = {}
        pairs = zip(others, islands, strict=True)
        return any(first.setdefault(place.tobytes(), island) != island for place, island in pairs)


@dataclasses.dataclass(frozen=True)
class Codecs:
    """The codecs of a program's collectives."""

    job: Job
    by_axis: dict[str, str]
    meshes: tuple[_Mesh, ...]

    @classmethod
    def of(cls, module: hlo.Module, job: Job, options: Options) -> "Codecs":
        """The codecs that the options name.

        Raises:
          UsageError: The program lacks an axis that its own options name.
        """
        if not options.wire or module.proto.name.startswith(_COPIES):
            return cls(job, {}, ())
        by_axis = {_OF_HOSTS: "", **dict(options.wire)}
        meshes = _meshes(module)
        names = sorted({name for mesh in meshes for name in mesh.names})
        if missing := sorted({*options.needed_axes} - {*names}):
            raise UsageError(
                f"{module.proto.name} has no mesh axis {missing[0]!r}, which the option wire of"
                f" jaxhet.jit names; axes of its meshes: {', '.join(names) or 'none'}"
            )
        return cls(job, by_axis, meshes)

    def of_collective(self, collective: Collective) -> str:
        """The codec of a collective, or "".

        An axis without an entry has the codec of "". A collective over several axes has one if all
        of them have the same one, in every mesh that has an axis with an entry.
        """
        instruction, module = collective.instruction, collective.computation.module
        if not self.by_axis or instruction.opcode not in _COMPRESSED:
            return ""
        if collectives.reducer(module, instruction) not in (None, "add"):
            return ""
        everywhere = self.by_axis.get("", "")
        islands = np.array([self.job.islands[rank] for rank in collective.rank_of])
        found = {
            self.by_axis.get(axis, everywhere)
            for mesh in self.meshes
            if len(mesh.places) == len(islands) and not self.by_axis.keys().isdisjoint(mesh.names)
            for axis in mesh.crossed(collective.groups, islands)
        }
        if not found:
            return everywhere
        return found.pop() if len(found) == 1 else ""


def _meshes(module: hlo.Module) -> tuple[_Mesh, ...]:
    text = module.proto.frontend_attributes.map.get(MESHES_ATTRIBUTE, "[]")
    meshes: list[_Mesh] = []
    for axes, ids in json.loads(text):
        sizes = [size for _, size in axes]
        places = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)
        meshes.append(
            _Mesh(tuple(name for name, _ in axes), places[np.argsort(ids)] if ids else places)
        )
    return tuple(meshes)
