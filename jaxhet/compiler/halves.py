"""Halves of exchanges that outlive a program: `jaxhet.start` in one, `jaxhet.finish` in another.

Each half is a collective-permute in a function with the name of the exchange. A permute along a
chain leads from each member of a group to the next one, but not from the last to the first. In a
start it stands for the start itself, whose result is its operand. In a finish it stands for a
member's own data; all other permutes of a finish stand for the data of other members. Arrays are
integers, which no compiler converts.
"""

import re
from collections.abc import Sequence

from jaxhet.compiler import hlo
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.exchange import ExchangeKind, Half
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.lowering import Lowering

_SCOPE = re.compile(r"jaxhet_(start|finish)_(\w+)")


def scope(half: str, name: str, leaf: int) -> str:
    """Name of the function around the permutes of a leaf; `half` is "start" or "finish"."""
    return f"jaxhet_{half}_{name}_{leaf}"


def of(instruction: hlo.Instruction) -> Half | None:
    """The half that a collective is, or None."""
    found = _SCOPE.search(instruction.metadata.op_name)
    if found is None or instruction.opcode != "collective-permute":
        return None
    return Half(is_finish=found[1] == "finish", name=found[2])


def keep_local(module: hlo.Module, crossing: Sequence[Collective]) -> bool:
    """Replaces halves along chains inside islands by their operands; returns whether any exist."""
    ids = {c.instruction.id for c in crossing}
    found = False
    for computation in module.computations.values():
        for instruction in list(computation.instructions):
            if of(instruction) is None or instruction.id in ids:
                continue
            pairs = [(p.source, p.target) for p in instruction.source_target_pairs]
            if _is_chain(pairs):
                computation.rewrite(instruction, "copy", computation.operands(instruction))
                found = True
    return found


def lower(lowering: Lowering, half: Half) -> None:
    """Replaces a half, which has one operand."""
    (value,), groups = lowering.flattened(), lowering.collective.groups
    kind = ExchangeKind.PERMUTE
    if not half.is_finish:
        groups, kind = _members(groups), ExchangeKind.ALL_GATHER
    elif _is_chain(groups):
        groups = tuple((i, i) for members in _members(groups) for i in members)
    lowering.replace_flat([lowering.exchanged(kind, value, groups)])


def _is_chain(pairs: Sequence[tuple[int, ...]]) -> bool:
    return {pair[0] for pair in pairs} != {pair[1] for pair in pairs}


def _members(pairs: Groups) -> Groups:
    """The members of each chain, from its first source on."""
    next_of = {pair[0]: pair[1] for pair in pairs}
    chains: list[tuple[int, ...]] = []
    for first in sorted(next_of.keys() - set(next_of.values())):
        chain = [first]
        while chain[-1] in next_of:
            chain.append(next_of[chain[-1]])
        chains.append(tuple(chain))
    return tuple(chains)
