"""Finds the arrays that each exchange of a program moves, without help of the plan.

An array is identified by its origin in the program, and by nothing that our passes made.
"""

import re

from jaxhet.compiler import carrier, hlo, loops

_NAME = re.compile(r".*name_\d+")
_EQUATIONS = re.compile(r"(?<!\w)e\d+(?=d\d)|\w+$")  # the numbers in an op_name
_PER_VENDOR = re.compile(r"/cond/|/jit\(jaxhet_per_platform")
# Slices of values that a loop's forward pass keeps. Vendors keep as many arrays as their pieces
# need, which numbers the slices.
_KEPT = re.compile(r"transpose\(.*/while/body/.*dynamic_slice")
_ANONYMOUS = ("constant", "iota", "partition-id")  # shared by arrays with different names
_VALUES = ("custom-call", "dot", "dynamic-slice", "gather", "reduce", "scatter", "sort", "while")


def of_module(module: hlo.Module, is_named: bool) -> list[list[str]]:
    """For each exchange, in the order of the plan, where the arrays in its operand come from.

    Args:
      module: The module behind PRE.
      is_named: Whether arrays are told by scopes "name_<number>" of the program. Else they are told
        by the equations that give them, as far as these are the same for all vendors.
    """
    found: dict[int, list[str]] = {}
    for computation in module.computations.values():
        for start in filter(carrier.is_start, computation.instructions):
            spec = carrier.read(start)
            members = _members(computation, start, spec.num_collectives)
            found[spec.index] = [_origin(computation, x, is_named) for x in members]
    return [found[index] for index in range(len(found))]


def _origin(computation: hlo.Computation, x: hlo.Instruction, is_named: bool) -> str:
    """Nearest names among the instructions that an array is made of."""
    found, seen, todo = set(), set(), [x]
    for i in todo:
        operands = _operands(computation, i)
        shown = [o for o in operands if o.opcode not in _ANONYMOUS]
        if i.id in seen or i.opcode in _ANONYMOUS or (operands and not shown):
            continue
        seen.add(i.id)
        name = _name(computation, i, is_named) if not _is_of_pipeline(computation, i) else None
        if name is not None:
            found.add(name)
            continue
        if i.opcode == "slice" and _is_of_one_round(i, operands[0]):
            found.add(f"round {i.slice_dimensions[0].start}")
        todo += operands
    return " + ".join(sorted(found))


def _operands(computation: hlo.Computation, i: hlo.Instruction) -> list[hlo.Instruction]:
    """The operands; of an element that a pipelined loop carries: the value that it carries on."""
    if _is_of_pipeline(computation, i):
        return [computation.operands(computation.root)[i.tuple_index]]
    return computation.operands(i)


def _is_of_pipeline(computation: hlo.Computation, i: hlo.Instruction) -> bool:
    return i.name.startswith("jaxhet.") and loops.carried(computation, i) is not None


def _is_of_one_round(i: hlo.Instruction, operand: hlo.Instruction) -> bool:
    """Whether a slice is one element of the first dimension, as an unrolled loop takes it."""
    ends = [(d.start, d.limit) for d in i.slice_dimensions]
    whole = [(0, size) for size in operand.shape.dimensions]
    return ends[1:] == whole[1:] and ends[0][1] - ends[0][0] == 1


def _name(computation: hlo.Computation, i: hlo.Instruction, is_named: bool) -> str | None:
    path = i.metadata.op_name
    if is_named:
        match = _NAME.match(path)
        return match[0] if match else None
    if i.opcode == "parameter":
        return f"parameter {i.parameter_number}"
    if i.opcode == "get-tuple-element" and computation.operands(i)[0].opcode == "parameter":
        (call,) = computation.module.callers[computation.id]
        return f"carried {i.tuple_index} of {_numbers(call.instruction)}"
    if i.opcode == "dynamic-slice" and _KEPT.search(path):
        return "kept"
    is_known = i.opcode in _VALUES and path and not _PER_VENDOR.search(path)
    return _numbers(i) if is_known else None


def _numbers(instruction: hlo.Instruction) -> str:
    """The numbers of equations in a name, and the primitive."""
    return " ".join(_EQUATIONS.findall(instruction.metadata.op_name))


def _members(
    computation: hlo.Computation, start: hlo.Instruction, count: int
) -> list[hlo.Instruction]:
    """The arrays that lie in the operand of an exchange, in their order."""
    todo = computation.operands(start)
    if count == 1:
        return todo
    for i in todo:
        if not i.name.startswith("jaxhet."):
            continue
        if i.name.startswith("jaxhet.concatenate") and len(i.operand_ids) == count:
            return computation.operands(i)
        todo += computation.operands(i)
    raise AssertionError(f"{start.name} has {count} members, and they are nowhere")
