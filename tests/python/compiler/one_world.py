"""Compiles training steps for two H100s, which are not there, as one world and as two islands.

Runs as a process of its own and prints a line of JSON for each step: its name, and its kernels as
one world, over two islands, and over two islands with `Options.one_world_kernels`.
"""

import dataclasses
import hashlib
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
from jaxhet.compiler import GPU_COMPILER_OPTIONS, Job, Options, Plan, hlo
from jaxhet.compiler import proto as pb
from models.configs import CONFIGS
from models.train import Schedule, Trainer
from tests.python.compiler.install_plugins import PLUGINS

# Deterministic, without the choices that XLA makes on a GPU only.
_FLAGS = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
# Fusions with none of these only move values, or add two arrays.
_ROUNDING = ("cosine", "divide", "exponential", "log", "multiply", "reduce", "rsqrt", "sqrt")
# The number of layers: few, and enough that loops would be pipelined.
_LAYERS = 8


class Compiler(deviceless.Compiler):
    """A compiler that keeps the scheduled module, with or without our passes."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.has_passes = True
        self.scheduled = b""

    def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
        return super().decompose(module, job, options) if self.has_passes else None

    def bridge(self, module: bytes, job: Job) -> tuple[bytes, Plan]:
        self.scheduled = module
        return module, Plan((), "")


def kernels(module: bytes) -> list[str]:
    """A digest of each fusion that rounds, and the result's shape of each library call."""
    parsed = hlo.Module(module)
    found = []
    for computation in parsed.computations.values():
        instructions = computation.instructions
        is_fused = not any(i.opcode in ("fusion", "while") for i in instructions)
        if is_fused and any(i.opcode in _ROUNDING for i in instructions):
            found.append(_digest(computation))
        calls = (i for i in instructions if i.custom_call_target.startswith("__cu"))
        found += [f"{i.custom_call_target} {_layouts(i.shape)}" for i in calls]
    return sorted(found)


def _layouts(shape: hlo.Shape) -> str:
    """Text of a shape and its layout. For a tuple, the elements follow."""
    order = ",".join(map(str, shape.layout.minor_to_major))
    return " ".join([f"{hlo.shape_text(shape)} {order}", *map(_layouts, shape.tuple_shapes)])


def _digest(computation: hlo.Computation) -> str:
    """Computation of a fusion; two compilations may number parameters and results differently."""
    root = computation.root
    roots = computation.operands(root) if root.opcode == "tuple" else [root]
    by_type: dict[int, str] = {}
    in_order = sorted(roots, key=lambda r: _expression(computation, r, by_type, None))
    exact: dict[int, str] = {}
    numbers: dict[int, int] = {}
    return " ".join(_expression(computation, r, exact, numbers) for r in in_order)


def _expression(
    c: hlo.Computation, i: hlo.Instruction, known: dict[int, str], numbers: dict[int, int] | None
) -> str:
    """A digest of an instruction and its operands.

    `numbers` numbers parameters in the order in which they are met. Without it all parameters are
    equal.
    """
    if i.id not in known:
        plain = pb.HloInstructionProto()
        plain.CopyFrom(i)
        for field in ("name", "id", "metadata", "backend_config", "parameter_number"):
            plain.ClearField(field)
        for field in ("operand_ids", "called_computation_ids", "frontend_attributes"):
            plain.ClearField(field)
        parts = [plain.SerializeToString(deterministic=True).hex()]
        if i.opcode == "parameter" and numbers is not None:
            parts.append(str(numbers.setdefault(i.id, len(numbers))))
        parts += [_expression(c, operand, known, numbers) for operand in c.operands(i)]
        known[i.id] = hashlib.blake2b(" ".join(parts).encode(), digest_size=12).hexdigest()
    return known[i.id]


def model_step(name: str, **changes: Any) -> Callable[[Mesh], Any]:
    """Lowers the step of a config of models/."""

    def lower(mesh: Mesh) -> Any:
        config = dataclasses.replace(
            CONFIGS[name], dtype="bfloat16", attention="xla", layers=_LAYERS, **changes
        )
        schedule = Schedule(3e-4, 20, weight_decay=0.1, max_gradient_norm=1.0)
        return Trainer(config, schedule, mesh).lower(jax.jit, 4, 128)

    return lower


def plain_step(mesh: Mesh) -> Any:
    """Lowers the step of benchmarks/plain_llama.py."""
    rows = NamedSharding(mesh, P("data"))
    size = plain_llama.Size(
        layers=_LAYERS, embed=256, heads=4, hidden=512, vocab=512, attention=None, rows=rows
    )
    shardings = plain_llama.shardings(size, mesh)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: plain_llama.init(size, jax.random.key(0))),
        shardings,
    )
    tokens = jax.ShapeDtypeStruct((4, 129), jnp.int32, sharding=rows)
    step = jax.jit(
        lambda state, tokens: plain_llama.train_step(size, state, tokens),
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, P())),
    )
    return step.lower(state, tokens)


STEPS = {
    "plain JAX": plain_step,
    "llama": model_step("demo"),
    "llama, unrolled": model_step("demo", scan=False),
    "qwen": model_step("demo-qwen"),
}


def main() -> None:
    sys.path.append(str(PLUGINS))
    over_islands = {**deviceless._COMPILER_OPTIONS, **_FLAGS}
    in_one_world = {k: v for k, v in over_islands.items() if k not in GPU_COMPILER_OPTIONS}
    compiler = Compiler()
    devices = compiler.devices(2, 1)
    islands = tuple(itertools.batched(devices, 1))
    for name, lower in STEPS.items():
        results = []
        for options in (None, Options(), Options(one_world_kernels=True)):
            compiler.has_passes = options is not None
            deviceless._COMPILER_OPTIONS = over_islands if options else in_one_world
            jax.clear_caches()
            lowered = lower(Mesh(np.array(devices), ("data",)))
            compiler.compile(lowered, islands, options or Options(), codegen=False)
            results.append(kernels(compiler.scheduled))
        print(json.dumps([name, results]), flush=True)


if __name__ == "__main__":
    main()
