"""Turns the GPU form into what XLA's CPU compiler takes late, to test what it computes.

Exchanges become collectives of XLA, in one process.
"""

import itertools
from collections.abc import Sequence

from jaxhet.compiler import arithmetic, carrier, hlo
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import proto as pb


def unfused(module: bytes, opcode: str) -> bytes:
    """Splits fusions with an `opcode` into single instructions, as modules for GPUs have them."""
    parsed = hlo.Module(module)
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


def with_copies(module: bytes) -> bytes:
    """The module with copies of the values that a pass added to loops: XLA on CPU adds none here.

    An iteration's new value is copied into the place of the old one when nothing reads that later.
    """
    parsed = hlo.Module(module)
    for computation in list(parsed.computations.values()):
        for loop in [i for i in computation.instructions if i.opcode == "while"]:
            body = parsed.computations[loop.called_computation_ids[0]]
            _copy_carried(computation, loop, body)
    return parsed.serialize()


def _copy_carried(c: hlo.Computation, loop: hlo.Instruction, body: hlo.Computation) -> None:
    (initial,) = c.operands(loop)
    for element in list(body.instructions):
        is_ours = element.name.startswith("jaxhet.") and element.opcode == "get-tuple-element"
        if not is_ours or body.operands(element)[0].opcode != "parameter":
            continue
        index = element.tuple_index
        start = c.operands(initial)[index]
        c.set_operand(initial, index, c.add("copy", start.shape, [start]))
        new = body.operands(body.root)[index]
        copy = body.add("copy", new.shape, [new])
        body.set_operand(body.root, index, copy)
        for reader in _readers(body, element):
            if reader.id not in (copy.id, body.root.id):
                body.add_control_predecessor(copy, reader)


def _readers(c: hlo.Computation, x: hlo.Instruction) -> list[hlo.Instruction]:
    """The instructions that read an array, or other views of it."""
    found: list[hlo.Instruction] = []
    for user in c.users(x):
        is_view = user.opcode in ("bitcast", "get-tuple-element", "tuple", "optimization-barrier")
        found += [user, *(_readers(c, user) if is_view and user.id != c.root.id else [])]
    return found


def to_cpu(module: bytes) -> bytes:
    """A decomposed module, without exchanges."""
    parsed = hlo.Module(module)
    for computation in list(parsed.computations.values()):
        for instruction in list(computation.instructions):
            _rewrite(computation, instruction)
    return parsed.serialize()


def _rewrite(c: hlo.Computation, instruction: hlo.Instruction) -> None:
    operands = c.operands(instruction)
    is_ours = instruction.name.startswith("jaxhet.")
    if instruction.opcode in carrier.CARRIERS.values():
        (start,) = operands
        own = c.operands(start)[0]
        part_elements = (
            carrier.read(start).movement.part_bytes * 8 // hlo.bit_width(own.shape.element_type)
        )
        _rewrite_done(c, instruction, start)
        c.remove(start, successor=instruction)
        if part_elements:
            _come_in_parts(c, instruction, own, part_elements)
    elif instruction.custom_call_target == "AllocateBuffer":
        shape = hlo.array_shape(pb.S32, [])
        zero = c.add("constant", shape, literal=pb.LiteralProto(shape=shape, s32s=[0]))
        zero = arithmetic.convert(c, zero, instruction.shape.element_type)
        c.rewrite(instruction, "broadcast", [zero])
    elif is_ours and instruction.opcode == "opt-barrier":
        c.rewrite(instruction, "copy", operands)
    elif is_ours and instruction.opcode == "all-to-all":
        groups = instruction.collective_device_list
        _in_tuple_form(c, instruction, operands[0], groups, instruction.channel_id)
    elif instruction.opcode == "reshape":
        shape = instruction.shape
        x = arithmetic.loop_fusion(c, operands, lambda f, x: f.add("reshape", shape, [x]))
        c.rewrite(instruction, "copy", [x])


def _rewrite_done(c: hlo.Computation, done: hlo.Instruction, start: hlo.Instruction) -> None:
    assert carrier.is_start(start)
    spec, operands = carrier.read(start), c.operands(start)
    groups, channel = start.collective_device_list, start.channel_id
    if not groups_lib.are_equal(spec.groups):
        _gather_unequal(c, done, start)
        return
    if spec.kind == "permute":
        pairs = start.source_target_pairs
        c.rewrite(
            done, "collective-permute", operands, channel_id=channel, source_target_pairs=pairs
        )
        return
    received = done
    if is_skipped := spec.movement.skips_own:
        received = c.add("copy", done.shape, operands)
    if spec.kind == "all_gather":
        c.rewrite(
            received,
            "all-gather",
            operands,
            channel_id=channel,
            collective_device_list=groups,
            dimensions=start.dimensions,
            use_global_device_ids=True,
        )
    else:  # a group's pairs are its members, each with the one after it
        sources = [pair.source for pair in start.source_target_pairs]
        for group in itertools.batched(sources, len(spec.groups[0])):
            groups.replica_groups.add(replica_ids=group)
        _in_tuple_form(c, received, operands[0], groups, channel)
    if is_skipped:
        members = [g.replica_ids for g in groups.replica_groups]
        c.rewrite(done, "copy", [_without_own(c, received, members)])


def _gather_unequal(c: hlo.Computation, done: hlo.Instruction, start: hlo.Instruction) -> None:
    """Each row is its member's; the own one and those without a member must not be used."""
    (x,) = c.operands(start)
    size = hlo.num_elements(x.shape)
    assignment = c.module.proto.device_assignment.computation_devices
    ranks = [devices.replica_device_ids[0] for devices in assignment]  # by logical id
    count = len(ranks)
    everyone = c.add(
        "all-gather",
        hlo.array_shape(x.shape.element_type, [size * count]),
        [x],
        channel_id=start.channel_id,
        collective_device_list=hlo.device_list((tuple(range(count)),)),
        dimensions=[0],
        use_global_device_ids=True,
    )
    group_of = {rank: group for group in carrier.read(start).groups for rank in group}

    def source(logical_id: int, row: int) -> int:
        group = group_of[ranks[logical_id]]
        is_there = row < len(group) and group[row] != ranks[logical_id]
        return ranks.index(group[row]) if is_there else (logical_id + 1) % count

    own_id = arithmetic.own_logical_id(c)
    starts = [
        [source(i, row) * size for i in range(count)]
        for row in range(hlo.num_elements(done.shape) // size)
    ]
    rows = [
        arithmetic.dynamic_slice_1d(c, everyone, arithmetic.entry(c, table, own_id), size)
        for table in starts
    ]
    c.rewrite(done, "copy", [arithmetic.concatenate(c, rows)])


def _come_in_parts(
    c: hlo.Computation, done: hlo.Instruction, own: hlo.Instruction, size: int
) -> None:
    """Splits the result into parts that arrive in turn; a part holds wrong values before."""
    whole = c.add(done.opcode, done.shape)
    name, instruction_id = whole.name, whole.id
    whole.CopyFrom(done)
    whole.name, whole.id = name, instruction_id
    c.rewrite(done, "copy", [_first(c, whole, own, size)])
    last = done
    for there in itertools.count(2 * size, size):
        part = next((u for u in c.users(last) if u.custom_call_target == carrier.PART_TARGET), None)
        if part is None:
            return
        received = _first(c, whole, own, there)
        last = next(u for u in c.users(part) if u.tuple_index == 0)
        c.rewrite(part, "tuple", [received, c.operands(part)[1]])


def _first(
    c: hlo.Computation, x: hlo.Instruction, y: hlo.Instruction, size: int
) -> hlo.Instruction:
    """The first elements of x, then y's."""
    length = hlo.num_elements(x.shape)
    if size >= length:
        return x
    rest = arithmetic.slice_1d(c, y, size, length - size)
    return arithmetic.concatenate(c, [arithmetic.slice_1d(c, x, 0, size), rest])


def _without_own(
    c: hlo.Computation, received: hlo.Instruction, groups: Sequence[Sequence[int]]
) -> hlo.Instruction:
    """The received rows. The device's own row must not be used and holds wrong values."""
    index_of = {member: index for group in groups for index, member in enumerate(group)}
    count = len(groups[0])
    size = hlo.num_elements(received.shape) // count
    own_id = arithmetic.own_logical_id(c)
    shape = hlo.array_shape(received.shape.element_type, [size])
    rows = [arithmetic.slice_1d(c, received, i * size, size) for i in range(count)]
    table = [index for _, index in sorted(index_of.items())]
    own = arithmetic.entry(c, table, own_id)
    wrong = [
        arithmetic.select(c, [arithmetic.equals(c, own, i, shape)], [row, rows[(i + 1) % count]])
        for i, row in enumerate(rows)
    ]
    return arithmetic.concatenate(c, wrong)


def _in_tuple_form(
    c: hlo.Computation,
    instruction: hlo.Instruction,
    x: hlo.Instruction,
    groups: pb.CollectiveDeviceListProto,
    channel: int,
) -> None:
    count = len(groups.replica_groups[0].replica_ids)
    size = hlo.num_elements(x.shape) // count
    shapes = [hlo.array_shape(x.shape.element_type, [size])] * count
    blocks = [arithmetic.slice_1d(c, x, i * size, size) for i in range(count)]
    fields = {"channel_id": channel, "collective_device_list": groups}
    received = c.add("all-to-all", hlo.tuple_shape(shapes), blocks, **fields)
    rows = [
        c.add("get-tuple-element", shape, [received], tuple_index=i)
        for i, shape in enumerate(shapes)
    ]
    c.rewrite(instruction, "copy", [arithmetic.concatenate(c, rows)])
