"""Compiles training steps with loops for a vendor's GPUs, and looks at the loops' schedules.

A process of its own: `pipelined_schedule.py {cuda|rocm}` prints a line of JSON for each program:
its name, then its plan and a record for each loop with exchanges.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plain_llama
from jaxhet._pretended import deviceless
from jaxhet.compiler import Options, carrier, hlo, integers, overlap
from jaxhet.compiler.loops import carried
from tests.python.compiler.install_plugins import PLUGINS
from tests.python.compiler.pipelined import Program

_LAYERS, _ROWS, _POSITIONS = 9, 8, 2048  # rows: of each device


def lower(mesh: Mesh, rows: int) -> Any:
    """Lowers a step of a LLaMA in plain JAX, whose mesh has the axis data or fsdp."""
    axes = P(mesh.axis_names)
    # XLA has no kernels for small products without a GPU; people train layers of this width.
    size = plain_llama.Size(layers=_LAYERS, rows=NamedSharding(mesh, axes))
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: plain_llama.init(size, jax.random.key(0))),
        plain_llama.shardings(size, mesh),
    )
    tokens = jax.ShapeDtypeStruct(
        (rows, _POSITIONS + 1), jnp.int32, sharding=NamedSharding(mesh, axes)
    )
    step = functools.partial(plain_llama.train_step, size)
    return jax.jit(step, donate_argnums=0).lower(state, tokens)


def lower_stored(mesh: Mesh, rows: int) -> Any:
    """Lowers a loop that stores what it has gathered inside islands: no kernel changes it."""
    (axis,) = mesh.axis_names

    def scanned(x: jax.Array) -> Any:
        def body(x: jax.Array, k: jax.Array) -> Any:
            x = (x + jax.lax.psum(x, axis) * k) % 97
            return x, jax.lax.pmax(x, axis)

        return jax.lax.scan(body, x, jnp.arange(_LAYERS))

    sharded = jax.shard_map(scanned, mesh=mesh, in_specs=P(axis), out_specs=(P(axis), P()))
    x = jax.ShapeDtypeStruct((rows, 34), jnp.int32, sharding=NamedSharding(mesh, P(axis)))
    return jax.jit(sharded).lower(x)


def lower_narrowed(mesh: Mesh, _: int) -> Any:
    """Lowers layers whose sums in float32 are stored in bfloat16."""
    mesh = Mesh(mesh.devices.reshape(-1, 1), ("data", "model"))
    program = Program.of(4)
    assert (program.dtype, program.is_sharded, program.has_constant) == ("bfloat16", True, True)
    step, shardings = program.function(mesh)
    shapes = jax.eval_shape(program.values)
    arguments = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return step.lower(*arguments)


def hazards(c: hlo.Computation, sequence: list[int]) -> list[str]:
    """Arrays of an iteration that overwrite arrays of the one before while these are still read.

    XLA reuses the memory of an iteration's inputs for its outputs.
    """
    at = {i: place for place, i in enumerate(sequence)}
    found: list[str] = []
    for index, new in enumerate(c.operands(c.root)):
        writer, readers = _memory(c, new), _readers(c, index)
        if writer.opcode in ("get-tuple-element", "parameter"):
            continue
        start = c.operands(writer)[0] if writer.custom_call_target == "jaxhet_done" else writer
        last = max((at[r.id] for r in readers if r.id not in (writer.id, c.root.id)), default=-1)
        if at[start.id] < last:
            found.append(f"{index}: {start.name} is written before {c[sequence[last]].name}")
    return found


def _memory(c: hlo.Computation, x: hlo.Instruction) -> hlo.Instruction:
    """The instruction that writes the memory of an array."""
    while x.opcode in ("bitcast", "opt-barrier", "get-tuple-element"):
        source = c.operands(x)[0]
        if source.opcode == "parameter":
            return x
        if source.opcode == "opt-barrier" and x.opcode == "get-tuple-element":
            source = c.operands(c.operands(source)[0])[x.tuple_index]
        x = source
    return x


def _readers(c: hlo.Computation, index: int) -> list[hlo.Instruction]:
    """The instructions that read the memory of an element of the tuple at the begin."""
    found: list[hlo.Instruction] = []
    for i in c.instructions:
        for operand in c.operands(i):
            memory = _memory(c, operand)
            if memory.opcode == "get-tuple-element" and memory.tuple_index == index:
                found.append(i)
    return found


Known = Callable[[hlo.Instruction], int | None]


def misplaced(module: hlo.Module, outer: hlo.Computation, loop: hlo.Instruction) -> list[str]:
    """Slices in a loop that XLA predicts to be elsewhere than they are, in some iteration."""
    config = json.loads(loop.backend_config or "{}")
    if "known_trip_count" not in config:
        return [f"the iterations of {loop.name} are unknown"]
    body = module.computations[loop.called_computation_ids[0]]
    (start,) = outer.operands(loop)
    elements = [integers.value(outer, x, lambda _: None) for x in outer.operands(start)]
    found: list[str] = []
    for iteration in range(int(config["known_trip_count"]["n"])):

        def known(i: hlo.Instruction, elements: list[int | None] = elements) -> int | None:
            index = carried(body, i)
            return None if index is None else elements[index]

        found += _misplaced_in(module, body, known, iteration)
        elements = [_value(body, x, known) for x in body.operands(body.root)]
    return found


def _value(c: hlo.Computation, scalar: hlo.Instruction, known: Known) -> int | None:
    """The value of an integer, also of one that a fusion computes."""

    def within(i: hlo.Instruction) -> int | None:
        if (given := known(i)) is not None:
            return given
        fusion = c.operands(i)[0] if i.opcode == "get-tuple-element" else i
        if fusion.opcode != "fusion":
            return None
        (fused,) = c.called(fusion)
        result = fused.root if fusion is i else fused.operands(fused.root)[i.tuple_index]
        operands = c.operands(fusion)

        def of_operand(x: hlo.Instruction) -> int | None:
            is_operand = x.opcode == "parameter"
            return _value(c, operands[x.parameter_number], known) if is_operand else None

        return _value(fused, result, of_operand)

    return integers.value(c, scalar, within)


def _misplaced_in(
    module: hlo.Module, c: hlo.Computation, known: Known, iteration: int
) -> list[str]:
    found: list[str] = []
    for i in c.instructions:
        if i.opcode in ("fusion", "async-start", "call"):

            def of_caller(x: hlo.Instruction, i: hlo.Instruction = i) -> int | None:
                if x.opcode != "parameter":
                    return None
                return _value(c, c.operands(i)[x.parameter_number], known)

            for called in c.called(i):
                found += _misplaced_in(module, called, of_caller, iteration)
        if b"dynamic_slice_config" in i.backend_config:
            config = json.loads(i.backend_config)["dynamic_slice_config"]
            is_moving = "loop_index" in config
            predicted = int(config["byte_offset"]) + is_moving * iteration * int(
                config["byte_stride"]
            )
            if (place := _place(c, i, known)) != predicted:
                found.append(f"{iteration}: {i.name} is at {place}, not at {predicted}")
    return found


def _place(c: hlo.Computation, i: hlo.Instruction, known: Known) -> int | None:
    """The first byte of a slice in its array, clamped as HLO says."""
    array, *rest = c.operands(i)
    is_update = i.opcode == "dynamic-update-slice"
    size = (rest[0].shape if is_update else i.shape).dimensions
    stride, place = hlo.bit_width(array.shape.element_type) // 8, 0
    for dim in array.shape.layout.minor_to_major:
        most = array.shape.dimensions[dim] - size[dim]
        start = _value(c, rest[is_update:][dim], known) if most else 0
        if start is None:
            return None
        place += stride * min(max(start, 0), most)
        stride *= array.shape.dimensions[dim]
    return place


def loops(module: hlo.Module) -> list[dict[str, Any]]:
    """A record for each loop with exchanges."""
    result = []
    for calls in module.callers.values():
        for outer, instruction in [
            (c.computation, c.instruction) for c in calls if c.instruction.opcode == "while"
        ]:
            body = module.computations[instruction.called_computation_ids[0]]
            sequence = list(module.proto.schedule.sequences[body.id].instruction_ids)
            targets = [body[i].custom_call_target for i in sequence]
            products = [p for p, i in enumerate(sequence) if overlap.holds_product(module, body[i])]
            starts = [p for p, t in enumerate(targets) if t == carrier.START_TARGET]
            dones = [p for p, t in enumerate(targets) if t == carrier.DONE_TARGET]
            if starts:
                result.append(
                    {
                        "exchanges": len(starts),
                        "before": sum(all(p < product for product in products) for p in starts),
                        "after": sum(all(p > product for product in products) for p in dones),
                        "repeated": len(sequence) - len(set(sequence)),
                        "hazards": hazards(body, sequence),
                        "misplaced": misplaced(module, outer, instruction),
                    }
                )
    # A loop calls two computations.
    return [r for place, r in enumerate(result) if r not in result[:place]]


def main(vendor: Any) -> None:
    compiler = deviceless.Compiler(vendor)
    # One vendor shows how many exchanges there are without pipelining.
    kinds = {"pipelined": 8} | ({"not pipelined": 0} if vendor == "cuda" else {})
    programs = {"data": lower, "fsdp": lower, "stored": lower_stored, "narrowed": lower_narrowed}
    for axis, per_island in itertools.product(programs, (1, 2)):
        for name, iterations in kinds.items():
            devices = compiler.devices(2, per_island)
            jax.clear_caches()
            islands = tuple(itertools.batched(devices, per_island))
            result = compiler.compile(
                programs[axis](Mesh(np.array(devices), (axis,)), _ROWS * len(devices)),
                islands,
                Options(pipeline_iterations=iterations),
                codegen=False,
            )
            assert result is not None
            record = {
                "fingerprint": result[1].fingerprint,
                "num_exchanges": len(result[1].exchanges),
                "loops": loops(hlo.Module(result[0])),
            }
            print(json.dumps([f"{axis}, {per_island} each, {name}", record]), flush=True)


if __name__ == "__main__":
    sys.path.append(str(PLUGINS))
    main(sys.argv[1])
