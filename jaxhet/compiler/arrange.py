"""Changes of XLA's schedule.

GPU  Loops whose exchanges `pipeline.py` has moved: starts first, dones last.
CPU  Sums of one program that do not depend on each other overlap.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, MutableSequence, Sequence

from jaxhet.compiler import carrier, hlo, loops, overlap


def arrange(module: hlo.Module) -> None:
    """Puts the starts of moved exchanges first in their iteration, and the dones last.

    XLA's scheduler believes exchanges to be as fast as NCCL over NVLink, and would start some late.
    """
    for c in module.computations.values():
        starts = [i for i in c.instructions if carrier.is_start(i) and carrier.read(i).is_pipelined]
        if starts:
            sequence = module.proto.schedule.sequences[c.id].instruction_ids
            first, late = _first(module, c, starts), _late(module, c, starts)
            if first & late:
                continue
            last = _copy_carried(c, starts, first, late)
            sequence[:] = [
                *(i for i in sequence if i in first),
                *(i for i in sequence if i not in first | late | {c.root.id}),
                *(i for i in sequence if i in late and i != c.root.id),
                *last,
                c.root.id,
            ]


def overlap_sums(module: hlo.Module) -> bool:
    """Lets all-reduces on CPUs start before earlier ones are done, if their operands allow it.

    Returns whether there are any.

    XLA's thunks wait for control predecessors, and for earlier thunks that use the same memory. The
    starts keep their order, because XLA runs programs of few thunks one thunk after the other.
    """
    sequences, is_changed = module.proto.schedule.sequences, False
    for c in module.computations.values():
        starts = [i for i in c.instructions if carrier.is_start(i)]
        sums = [i for i in starts if carrier.read(i).collective.startswith("all-reduce")]
        for first, second in itertools.pairwise(sorted(sums, key=carrier.index_of_call)):
            kept = [i for i in second.control_predecessor_ids if i != first.id]
            if len(kept) == len(second.control_predecessor_ids):
                continue  # another step of the plan is between them
            is_changed = True
            c.set_control_predecessors(second, kept)
            needed = _closure({second.id}, lambda i, c=c: c.predecessors(c[i]))
            if c.id in sequences and first.id not in needed:
                _move_behind(sequences[c.id].instruction_ids, first, needed)
    return is_changed


def _move_behind(sequence: MutableSequence[int], first: hlo.Instruction, moved: set[int]) -> None:
    """Puts later instructions of `moved` directly behind the first."""
    place = list(sequence).index(first.id) + 1
    behind = sequence[place:]
    sequence[place:] = [i for i in behind if i in moved] + [i for i in behind if i not in moved]


def _first(module: hlo.Module, c: hlo.Computation, starts: Sequence[hlo.Instruction]) -> set[int]:
    """Starts that depend on no instruction that takes time, and the instructions they depend on."""
    early: set[int] = set()
    for i in module.proto.schedule.sequences[c.id].instruction_ids:
        is_wait = _takes_time(module, c[i]) or _is_wait(module, c[i])
        if not is_wait and all(p.id in early for p in c.predecessors(c[i])):
            early.add(i)
    return _closure({i.id for i in starts} & early, lambda i: c.predecessors(c[i]))


def _late(module: hlo.Module, c: hlo.Computation, starts: Sequence[hlo.Instruction]) -> set[int]:
    """Dones whose users take no time, and these users."""
    followers: dict[int, list[hlo.Instruction]] = collections.defaultdict(list)
    for i in c.instructions:
        for p in c.predecessors(i):
            followers[p.id].append(i)
    dones = {u.id for i in starts for u in c.users(i)}
    late = _closure(dones, followers.__getitem__)
    if any(_takes_time(module, c[i]) or carrier.is_start(c[i]) for i in late):
        return set()
    return late | {c.root.id}


def _closure(ids: set[int], following: Callable[[int], Iterable[hlo.Instruction]]) -> set[int]:
    found, waiting = set(ids), list(ids)
    while waiting:
        new = {i.id for i in following(waiting.pop())} - found
        found |= new
        waiting += new
    return found


def _copy_carried(
    c: hlo.Computation, starts: Sequence[hlo.Instruction], first: set[int], late: set[int]
) -> list[int]:
    """Adds copies at the end of the iteration, so that no array is overwritten while it is read.

    An iteration's new arrays use the memory of the old ones. XLA omitted the copies that its own
    schedule did not need; now `first` writes earlier, and `late` reads later.

    Returns:
      The ids of the copies.
    """
    early_results = first | {u.id for i in starts for u in c.users(i)}
    read_late = {
        origin.tuple_index
        for i in late - {c.root.id}
        for operand in c.operands(c[i])
        if loops.carried(c, origin := _origin(c, operand)) is not None
    }
    copies: list[int] = []
    for place, new in enumerate(c.operands(c.root)):
        origin = _origin(c, new)
        if loops.carried(c, origin) is not None:
            continue
        if origin.id in early_results or (place in read_late and origin.id not in late):
            copy = c.add("copy", new.shape, [new])
            c.set_operand(c.root, place, copy)
            copies.append(copy.id)
    return copies


def _origin(c: hlo.Computation, x: hlo.Instruction) -> hlo.Instruction:
    """The instruction whose memory holds an array."""
    while loops.carried(c, x) is None:
        x, before = loops.behind_barrier(c, x), x
        is_view = x.opcode in ("bitcast", "get-tuple-element", "opt-barrier")
        if is_view and loops.carried(c, x) is None:
            x = c.operands(x)[0]
        if x is before:
            break
    return x


def _takes_time(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    is_control_flow = instruction.opcode in ("call", "conditional", "while")
    return is_control_flow or overlap.holds_product(module, instruction)


def _is_wait(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether an instruction waits for a collective or exchange."""
    opcode = instruction.opcode
    if opcode in hlo.COLLECTIVES and not opcode.endswith("-start"):
        return True
    if opcode == "async-done":
        called = [module.computations[i] for i in instruction.called_computation_ids]
        return any(i.opcode in hlo.COLLECTIVES for c in called for i in c.instructions)
    return opcode.endswith("-done") and f"{opcode.removesuffix('-done')}-start" in hlo.COLLECTIVES
