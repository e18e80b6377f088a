"""Loops that count up to a constant, as `jax.lax.scan` and `fori_loop` make them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxhet.compiler import hlo, integers
from jaxhet.compiler import proto as pb


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `while` whose number of iterations is known, and what it carries. Its counter is signed.

    Attributes:
      outer: The computation that the loop is in.
      instruction: The `while`.
      body: Computation of one iteration; its parameter and its root are tuples.
      condition: Computation that compares the counter with a constant.
      counter: Index of the counter in the tuple.
      values: The counter in each iteration.
    """

    outer: hlo.Computation
    instruction: hlo.Instruction
    body: hlo.Computation
    condition: hlo.Computation
    counter: int
    values: range

    @property
    def initial(self) -> list[hlo.Instruction]:
        """The elements of the tuple that the loop starts with, in the outer computation."""
        (initial,) = self.outer.operands(self.instruction)
        return self.outer.operands(initial)

    @property
    def parameter(self) -> hlo.Instruction:
        """The tuple at the begin of an iteration."""
        return _parameter(self.body)

    def carried(self, instruction: hlo.Instruction) -> int | None:
        """Index of an instruction of the body in the loop's tuple; None for all others."""
        return carried(self.body, instruction)

    def is_invariant(self, index: int) -> bool:
        """Whether an element of the tuple is the same in all iterations."""
        return self.carried(self.body[self.body.root.operand_ids[index]]) == index

    def value(self, scalar: hlo.Instruction, counter: int) -> int | None:
        """Value of an integer of the body in one iteration; None if other data decides it."""

        def known(i: hlo.Instruction) -> int | None:
            return counter if self.carried(i) == self.counter else None

        return integers.value(self.body, scalar, known)

    def extend(self, initial: Sequence[hlo.Instruction], new: Sequence[hlo.Instruction]) -> None:
        """Carries more arrays; `element` returns them at the beginning of an iteration.

        Args:
          initial: Instructions of the outer computation, with which the loop starts.
          new: Instructions of the body, which an iteration hands to the next one.
        """
        outer, body = self.outer, self.body
        start = [*self.initial, *initial]
        shape = hlo.tuple_shape([i.shape for i in start])
        _rewrite(body, body.root, shape, [*body.operands(body.root), *new])
        for c in (body, self.condition):
            _rewrite(c, _parameter(c), shape, [])
            c.proto.program_shape.parameters[0].CopyFrom(shape)
        body.proto.program_shape.result.CopyFrom(shape)
        _rewrite(outer, self.instruction, shape, [outer.add("tuple", shape, start)])

    def element(self, index: int, shape: hlo.Shape) -> hlo.Instruction:
        """An element of the tuple at the begin of an iteration."""
        return self.body.add("get-tuple-element", shape, [self.parameter], tuple_index=index)

    def result(self, index: int, shape: hlo.Shape) -> hlo.Instruction:
        """An element of the tuple after the loop."""
        return self.outer.add("get-tuple-element", shape, [self.instruction], tuple_index=index)


def find(module: hlo.Module, outer: hlo.Computation, instruction: hlo.Instruction) -> Loop | None:
    """The loop of a `while`; None if its form or its number of iterations is unknown."""
    body, condition = outer.called(instruction)
    is_only_caller = all(len(module.callers[c.id]) == 1 for c in (body, condition))
    (initial,) = outer.operands(instruction)
    if not is_only_caller or body.root.opcode != "tuple" or initial.opcode != "tuple":
        return None
    if outer.root.id == instruction.id or not _only_elements(outer, instruction):
        return None
    if not all(_only_elements(c, _parameter(c)) for c in (body, condition)):
        return None
    test = condition.root
    if test.opcode != "compare" or test.comparison_direction != "LT":
        return None
    counter = carried(condition, condition.operands(test)[0])
    if counter is None:
        return None

    def known(value: int | None) -> Any:
        return lambda i: value if carried(body, i) == counter else None

    limit = integers.value(condition, condition.operands(test)[1], lambda _: None)
    start = integers.value(outer, outer.operands(initial)[counter], lambda _: None)
    following = body.operands(body.root)[counter]
    if start is None or limit is None or following.opcode != "add":
        return None
    if following.shape.element_type not in (pb.S32, pb.S64):
        return None
    steps = {integers.value(body, following, known(at)) == at + 1 for at in (start, limit)}
    if steps != {True}:
        return None
    return Loop(outer, instruction, body, condition, counter, range(start, limit))


def _parameter(c: hlo.Computation) -> hlo.Instruction:
    return next(i for i in c.instructions if i.opcode == "parameter")


def carried(c: hlo.Computation, instruction: hlo.Instruction) -> int | None:
    """Index of an element of a computation's only parameter, a tuple; None for all others."""
    if instruction.opcode != "get-tuple-element":
        return None
    (source,) = c.operands(instruction)
    return instruction.tuple_index if source.opcode == "parameter" else None


def behind_barrier(c: hlo.Computation, x: hlo.Instruction) -> hlo.Instruction:
    """The same value without the barriers of `jax.checkpoint`, which only delay recomputation."""
    while x.opcode == "get-tuple-element":
        (barrier,) = c.operands(x)
        if barrier.opcode != "opt-barrier":
            break
        (together,) = c.operands(barrier)
        if together.opcode != "tuple":
            break
        x = c.operands(together)[x.tuple_index]
    return x


def _only_elements(c: hlo.Computation, x: hlo.Instruction) -> bool:
    return all(user.opcode == "get-tuple-element" for user in c.users(x))


def _rewrite(
    c: hlo.Computation, old: hlo.Instruction, shape: hlo.Shape, operands: list[hlo.Instruction]
) -> None:
    """Sets shape and operands; drops properties of the old shape, such as shardings."""
    c.rewrite(
        old,
        old.opcode,
        operands,
        shape=shape,
        parameter_number=old.parameter_number,
        called_computation_ids=list(old.called_computation_ids),
        backend_config=old.backend_config,
        frontend_attributes=old.frontend_attributes,
    )
