"""Turns the GPU form into what XLA's CPU compiler takes late, to test what it computes.

Exchanges become permutes of XLA, in one process.
"""

import itertools

from jaxhet.compiler import arithmetic, exchange, hlo


def unfused(module: bytes, opcode: str) -> bytes:
    """The module with the loops that hold an `opcode` as single instructions, as GPUs have them."""
    parsed = hlo.Module(module)
    parsed._next_name = itertools.count(2_000_000)
    for computation in list(parsed.computations.values()):
        for fusion in [i for i in computation.instructions if i.opcode == "fusion"]:
            fused = parsed.computations[fusion.called_computation_ids[0]]
            if any(i.opcode == opcode for i in fused.instructions):
                _inline(computation, fusion, fused)
    return parsed.serialize()


def _inline(c: hlo.Computation, fusion: hlo.Instruction, fused: hlo.Computation) -> None:
    operands = c.operands(fusion)
    copies: dict[int, hlo.Instruction] = {}
    for old in fused.instructions:
        if old.opcode == "parameter":
            copies[old.id] = operands[old.parameter_number]
            continue
        new = fusion if old.id == fused.root.id else c.add(old.opcode, old.shape)
        copy = hlo.Instruction()
        copy.CopyFrom(old)
        copy.name, copy.id = new.name, new.id
        copy.operand_ids[:] = [copies[i].id for i in old.operand_ids]
        c.replace(new, copy)
        copies[old.id] = new
    c.module.remove_computation(fused)


def to_cpu(module: bytes) -> bytes:
    """A decomposed module, without exchanges."""
    parsed = hlo.Module(module)
    parsed._next_name = itertools.count(1_000_000)  # the pass's own names are in there
    for computation in list(parsed.computations.values()):
        for instruction in list(computation.instructions):
            _rewrite(computation, instruction)
    return parsed.serialize()


def _rewrite(c: hlo.Computation, instruction: hlo.Instruction) -> None:
    operands = c.operands(instruction)
    is_ours = instruction.name.startswith("jaxhet.")
    if instruction.opcode == "collective-permute-done":
        (start,) = operands
        assert exchange.is_start(start)
        fields = {"channel_id": start.channel_id, "source_target_pairs": start.source_target_pairs}
        c.rewrite(instruction, "collective-permute", c.operands(start), **fields)
        c.remove(start, successor=instruction)
    elif is_ours and instruction.opcode == "opt-barrier":
        c.rewrite(instruction, "copy", operands)
    elif is_ours and instruction.opcode == "all-to-all":
        _in_tuple_form(c, instruction, operands[0])
    elif instruction.opcode == "reshape":
        shape = instruction.shape
        x = arithmetic.loop_fusion(c, operands, lambda f, x: f.add("reshape", shape, [x]))
        c.rewrite(instruction, "copy", [x])


def _in_tuple_form(c: hlo.Computation, instruction: hlo.Instruction, x: hlo.Instruction) -> None:
    groups = instruction.collective_device_list
    count = len(groups.replica_groups[0].replica_ids)
    size = hlo.num_elements(x.shape) // count
    shapes = [hlo.array_shape(x.shape.element_type, [size])] * count
    blocks = [arithmetic.slice_1d(c, x, i * size, size) for i in range(count)]
    channel = instruction.channel_id
    fields = {"channel_id": channel, "collective_device_list": groups}
    came = c.add("all-to-all", hlo.tuple_shape(shapes), blocks, **fields)
    rows = [
        c.add("get-tuple-element", shape, [came], tuple_index=i) for i, shape in enumerate(shapes)
    ]
    c.rewrite(instruction, "copy", [arithmetic.concatenate(c, rows)])
