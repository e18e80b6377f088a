"""The collectives of a compiled program and the groups of devices that they join."""

from collections.abc import Iterator

from jaxhet.compiler import hlo
from jaxhet.compiler.collectives import groups_of
from tests.python.compiler import hlo_text


def collectives(text: str, in_loops: bool = False) -> Iterator[tuple[str, list[list[int]]]]:
    """Each collective's name and groups (a permute's pairs), as positions of devices.

    Args:
      text: The whole module.
      in_loops: Only collectives in the bodies of loops.
    """
    module = hlo.Module(hlo_text.parsed(text))
    for computation in module.computations.values():
        callers = {call.instruction.opcode for call in module.callers.get(computation.id, ())}
        if in_loops and "while" not in callers:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in hlo.COLLECTIVES:
                groups = groups_of(module, instruction)
                yield instruction.opcode.removesuffix("-start"), [list(group) for group in groups]
