"""Gathers that may start early, since their operands (weights) exist from the beginning."""

import dataclasses
import re

from jaxhet.compiler import hlo, loops
from jaxhet.compiler.collectives import PER_PLATFORM, Collective

# Paths of instructions that another platform may lack: in a piece of `jaxhet.per_platform`, or in a
# branch of `jax.lax.platform_dependent`.
_OF_ONE_PLATFORM = re.compile(rf"{PER_PLATFORM}|/cond/branch_")
# Instructions that take time, or may take time.
_SLOW = frozenset(
    (
        *hlo.COLLECTIVES,
        "async-start",
        "call",
        "cholesky",
        "conditional",
        "convolution",
        "custom-call",
        "dot",
        "fft",
        "infeed",
        "scatter",
        "sort",
        "triangular-solve",
        "while",
    )
)


def mark(collective: Collective, *, is_gpu: bool) -> Collective:
    """Sets whether a gather may start early.

    On GPUs, takes such a gather out of the barrier of `jax.checkpoint`. The barrier
    delays recomputation, and with it the gathers of a layer's weights, until the gradients of the
    layer behind it are ready.
    """
    c, instruction = collective.computation, collective.instruction
    if instruction.opcode != "all-gather":
        return collective
    operands = c.operands(instruction)
    if not all(_is_there(c, x) for x in operands):
        return collective
    if is_gpu:
        for place, x in enumerate(operands):
            c.set_operand(instruction, place, _without_barrier(c, x))
    return dataclasses.replace(collective, is_early=True)


def _is_there(c: hlo.Computation, x: hlo.Instruction) -> bool:
    """Whether an array is computed from the inputs by instructions that take no time."""
    waiting, seen = [x], set[int]()
    while waiting:
        i = loops.behind_barrier(c, waiting.pop())
        if i.id in seen:
            continue
        seen.add(i.id)
        if _is_slow(c, i):
            return False
        waiting += c.predecessors(i)
    return True


def _without_barrier(c: hlo.Computation, x: hlo.Instruction) -> hlo.Instruction:
    """The same value without the other dependencies of the barrier."""
    source = loops.behind_barrier(c, x)
    if source is not x:
        # A barrier of its own keeps XLA from sharing a conversion with the forward pass: the result
        # would take memory until then.
        return c.add("opt-barrier", source.shape, [source])
    if x.opcode in hlo.FORMS:
        (operand,) = c.operands(x)
        other = _without_barrier(c, operand)
        return x if other is operand else c.add_copy(x, [other])
    return x


def _is_slow(c: hlo.Computation, i: hlo.Instruction) -> bool:
    if _OF_ONE_PLATFORM.search(i.metadata.op_name):
        return False  # the order of exchanges must not depend on one vendor's code
    return i.opcode in _SLOW or any(_is_slow(f, j) for f in c.called(i) for j in f.instructions)
