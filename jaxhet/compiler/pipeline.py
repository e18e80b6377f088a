"""Exchanges of a loop overlap with the neighbouring iteration: software pipelining, on GPUs.

Inside one iteration of a loop over layers nothing is left to compute beside the last gradients, and
beside the first weights. So

* a reduction whose result is only stored, in its iteration's place of a stacked array, moves to the
  next iteration. The operand is carried there; the last result is stored after the loop;
* a gather whose operand depends on the iteration's number alone, as a layer's weights do, moves to
  the iteration before. The result is carried; the first gather is before the loop.

The first iteration has no operand for a reduction yet and reduces zeros. Nobody uses the last
iteration's gathers. So each moved exchange runs once more than the loop has iterations. All results
are the same to the bit. XLA's own pipeliners know neither exchanges nor islands.

The counter alone decides where both read and write, and the places stay inside the arrays. XLA's
GPU compiler predicts the places of slices and does not clamp them. It takes a counter that is
carried from the iteration before for one that starts a step earlier.

`arrange.py` moves starts and dones in the schedule: XLA's scheduler would put most dones directly
behind the starts.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxhet.compiler import arithmetic, hlo, integers, loops, order
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.loops import Loop

_REDUCTIONS = ("all-reduce", "reduce-scatter")
# Cheap instructions without side effects, which may be computed once more elsewhere.
_CHEAP = (
    *hlo.FORMS,
    "add",
    "and",
    "broadcast",
    "clamp",
    "compare",
    "constant",
    "divide",
    "dynamic-slice",
    "iota",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "or",
    "partition-id",
    "remainder",
    "select",
    "slice",
    "subtract",
)
# Opcodes that may lie between a reduction and the array that it is stored in.
_BETWEEN = (*hlo.FORMS, "divide", "dynamic-slice", "multiply", "negate", "slice")


def pipeline(module: hlo.Module, crossing: Sequence[Collective], least_iterations: int) -> set[int]:
    """Moves collectives that cross islands to a neighbouring iteration of their loops.

    Args:
      module: The module; each computation with a collective has one caller. Changed in place.
      crossing: All collectives that cross islands, as XLA has written them.
      least_iterations: Loops with fewer iterations stay as they are.

    Returns:
      The ids of the collectives that were moved in their loops.
    """
    by_body: dict[int, list[hlo.Instruction]] = collections.defaultdict(list)
    for collective in crossing:
        by_body[collective.computation.id].append(collective.instruction)
    moved: set[int] = set()
    for loop in _loops(module, by_body):
        if len(loop.values) >= least_iterations:
            instructions = by_body[loop.body.id]
            sinks = [s for i in instructions if (s := _sink(loop, i)) is not None]
            gathers = [i for i in instructions if _is_early(loop, i)]
            _move_gathers(loop, gathers)
            _move_reductions(loop, sinks)
            moved |= {i.id for i in gathers} | {s.reduction.id for s in sinks}
    return moved


def _loops(module: hlo.Module, bodies: dict[int, list[hlo.Instruction]]) -> Iterator[Loop]:
    for body_id in sorted(bodies):
        calls = module.callers.get(body_id, ())
        if len(calls) == 1 and calls[0].instruction.opcode == "while":
            loop = loops.find(module, calls[0].computation, calls[0].instruction)
            if loop is not None and loop.body.id == body_id:
                yield loop


# --- reductions, to the next iteration ---


@dataclasses.dataclass(frozen=True)
class _Sink:
    """A reduction, and the path from its result to the array that stores it.

    Attributes:
      reduction: The collective.
      between: The instructions from its result to the stored value, in order.
      update: The dynamic-update-slice that stores it.
      index: Which element of the loop's tuple it is stored in.
      start: Which operand of `update` depends on the counter.
    """

    reduction: hlo.Instruction
    between: tuple[hlo.Instruction, ...]
    update: hlo.Instruction
    index: int
    start: int


def _sink(loop: Loop, reduction: hlo.Instruction) -> _Sink | None:
    body = loop.body
    if reduction.opcode not in _REDUCTIONS or len(reduction.operand_ids) != 1:
        return None
    if reduction.control_predecessor_ids or hlo.bit_width(reduction.shape.element_type) < 8:
        return None
    between: list[hlo.Instruction] = []
    last = reduction
    while True:
        users = body.users(last)
        if len(users) != 1 or list(users[0].operand_ids).count(last.id) != 1:
            return None
        user = users[0]
        if user.opcode == "dynamic-update-slice" and user.operand_ids[1] == last.id:
            break
        others = [o for o in body.operands(user) if o.id != last.id]
        if user.opcode not in _BETWEEN or not all(_is_cheap(loop, o, None) for o in others):
            return None
        between.append(user)
        last = user
    stored = _stored(loop, user)
    if stored is None:
        return None
    return _Sink(reduction, tuple(between), user, *stored)


def _stored(loop: Loop, update: hlo.Instruction) -> tuple[int, int] | None:
    """Which element of the tuple is updated, and which operand says where.

    None if anything else than the update reads that element in the loop, or if two iterations
    could write the same place.
    """
    body = loop.body
    array, value, *starts = body.operands(update)
    index = loop.carried(array)
    roots = list(body.root.operand_ids)
    if index is None or roots[index] != update.id or roots.count(update.id) != 1:
        return None
    readers = [i for i in body.instructions if loop.carried(i) == index]
    if len(readers) != 1 or len(body.users(array)) != 1 or len(body.users(update)) != 1:
        return None
    moving = [
        place
        for place, start in enumerate(starts)
        if integers.value(body, start, lambda _: None) is None
    ]
    if len(moving) != 1:
        return None
    (place,) = moving
    found = [loop.value(starts[place], counter) for counter in loop.values]
    if None in found:
        return None
    at = sorted(x for x in found if x is not None)
    size, whole = value.shape.dimensions[place], array.shape.dimensions[place]
    is_inside = at[0] >= 0 and at[-1] + size <= whole
    is_apart = all(b - a >= size for a, b in itertools.pairwise(at))
    results = [u for u in loop.outer.users(loop.instruction) if u.tuple_index == index]
    return (index, 2 + place) if is_inside and is_apart and len(results) == 1 else None


def _move_reductions(loop: Loop, sinks: Sequence[_Sink]) -> None:
    if not sinks:
        return
    body, outer = loop.body, loop.outer
    operands = {s.reduction.operand_ids[0]: body.operands(s.reduction)[0] for s in sinks}
    count = len(loop.initial)
    loop.extend([_zeros(outer, x.shape) for x in operands.values()], [*operands.values()])
    index_of = {i: count + place for place, i in enumerate(operands)}
    elements = {i: loop.element(index_of[i], x.shape) for i, x in operands.items()}
    results = {i: loop.result(index_of[i], x.shape) for i, x in operands.items()}
    before = _Copies(loop, _counter_before(loop), in_body=True)
    for sink in sinks:
        operand = sink.reduction.operand_ids[0]
        _store_last(loop, sink, results[operand])
        body.set_operand(sink.reduction, 0, elements[operand])
        body.set_operand(sink.update, sink.start, before.of(body.operands(sink.update)[sink.start]))
        _start_at_once(loop, sink.reduction)


def _counter_before(loop: Loop) -> hlo.Instruction:
    """The counter of the iteration before; in the first iteration, its own."""
    body = loop.body
    # Not `loop.element`: XLA counts no iterations where two instructions read the counter.
    counter = next(i for i in body.instructions if loop.carried(i) == loop.counter)
    first, one = (
        arithmetic.integers(body, [], [x], counter.shape.element_type) for x in (loop.values[0], 1)
    )
    before = body.add("subtract", counter.shape, [counter, one])
    return body.add("maximum", counter.shape, [before, first])


def _store_last(loop: Loop, sink: _Sink, operand: hlo.Instruction) -> None:
    """Stores the reduction of the last iteration, after the loop."""
    body, outer = loop.body, loop.outer
    copies = _Copies(loop, None)
    last = outer.add_copy(sink.reduction, [operand])
    _start_at_once(loop, last)
    copies.known[sink.reduction.id] = last
    for instruction in sink.between:
        last = copies.of(instruction)
    (result,) = [u for u in outer.users(loop.instruction) if u.tuple_index == sink.index]
    array = loop.result(sink.index, result.shape)
    starts = [
        _scalar(outer, x, loop.value(x, loop.values[-1])) if place == sink.start else copies.of(x)
        for place, x in enumerate(body.operands(sink.update))
        if place >= 2
    ]
    outer.rewrite(result, "dynamic-update-slice", [array, last, *starts])


def _zeros(c: hlo.Computation, shape: hlo.Shape) -> hlo.Instruction:
    zero = arithmetic.convert(c, arithmetic.integers(c, [], [0]), shape.element_type)
    return c.add("broadcast", shape, [zero])


def _scalar(c: hlo.Computation, like: hlo.Instruction, value: int | None) -> hlo.Instruction:
    assert value is not None, like.name
    constant = arithmetic.integers(c, [], [value])
    return arithmetic.convert(c, constant, like.shape.element_type)


# --- gathers, to the iteration before ---


def _is_early(loop: Loop, gather: hlo.Instruction) -> bool:
    """Whether a gather's operand is known from the number of the iteration alone."""
    if gather.opcode != "all-gather" or len(gather.operand_ids) != 1:
        return False
    if gather.control_predecessor_ids:
        return False
    (operand,) = loop.body.operands(gather)
    return _is_cheap(loop, operand, loop.counter) and not _is_cheap(loop, operand, None)


def _move_gathers(loop: Loop, gathers: Sequence[hlo.Instruction]) -> None:
    if not gathers:
        return
    body, outer = loop.body, loop.outer
    first = _Copies(loop, loop.initial[loop.counter])
    count = len(loop.initial)
    initial = [outer.add_copy(g, [first.of(body.operands(g)[0])]) for g in gathers]
    following = _Copies(loop, _counter_behind(loop), in_body=True)
    operands = [following.of(body.operands(g)[0]) for g in gathers]
    users = [body.users(g) for g in gathers]
    root = body.root
    loop.extend(initial, gathers)
    for place, (gather, operand) in enumerate(zip(gathers, operands, strict=True)):
        element = loop.element(count + place, gather.shape)
        for user in users[place]:
            for at, operand_id in enumerate(user.operand_ids):
                if operand_id == gather.id and (user.id != root.id or at < count):
                    body.set_operand(user, at, element)
        body.set_operand(gather, 0, operand)
        _start_at_once(loop, gather)


def _counter_behind(loop: Loop) -> hlo.Instruction:
    """The counter of the next iteration; in the last iteration, its own."""
    body, shape = loop.body, loop.initial[loop.counter].shape
    last = arithmetic.integers(body, [], [loop.values[-1]], shape.element_type)
    return body.add("minimum", shape, [body.operands(body.root)[loop.counter], last])


def _start_at_once(loop: Loop, instruction: hlo.Instruction) -> None:
    """Sets the depth of a collective to 0, the beginning of an iteration."""
    prefix, name = loop.instruction.metadata.op_name, instruction.metadata.op_name
    if prefix and name.startswith(f"{prefix}/"):
        inside = name.removeprefix(prefix)
        instruction.metadata.op_name = prefix + order.with_depths(inside, "d0")


# --- copies of cheap instructions ---


def _is_cheap(loop: Loop, instruction: hlo.Instruction, counter: int | None) -> bool:
    """Whether a value is made of constants, of what a loop does not change, and of the counter."""
    body = loop.body
    waiting, seen = [instruction], set[int]()
    while waiting:
        i = loops.behind_barrier(body, waiting.pop())
        if i.id in seen:
            continue
        seen.add(i.id)
        index = loop.carried(i)
        if index is not None:
            if index != counter and not loop.is_invariant(index):
                return False
        elif i.opcode not in _CHEAP or i.control_predecessor_ids:
            return False
        else:
            waiting += body.operands(i)
    return True


class _Copies:
    """Copies of cheap instructions of a body, outside of the loop or with another counter.

    Attributes:
      known: Instruction id to its replacement.
    """

    def __init__(self, loop: Loop, counter: hlo.Instruction | None, in_body: bool = False):
        self.known: dict[int, hlo.Instruction] = {}
        self._loop = loop
        self._counter = counter
        self._in_body = in_body

    def of(self, instruction: hlo.Instruction) -> hlo.Instruction:
        """The copy of an instruction."""
        if instruction.id not in self.known:
            self.known[instruction.id] = self._copy(instruction)
        return self.known[instruction.id]

    def _copy(self, instruction: hlo.Instruction) -> hlo.Instruction:
        loop = self._loop
        instruction = loops.behind_barrier(loop.body, instruction)
        index = loop.carried(instruction)
        if index == loop.counter and self._counter is not None:
            return self._counter
        if index is not None:
            if self._in_body:
                return instruction
            return loop.initial[index]
        target = loop.body if self._in_body else loop.outer
        return target.add_copy(instruction, [self.of(o) for o in loop.body.operands(instruction)])
