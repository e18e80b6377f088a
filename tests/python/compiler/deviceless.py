"""Compiles programs with a vendor's real compiler and our passes, on a machine without a GPU.

A process of its own: `deviceless.py {cuda|rocm}` prints a line of JSON for each case: its name,
then plan and schedule.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import xla_bridge
from jax._src.lib import _xla, xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.cpu import _lapack  # pyright: ignore[reportAttributeAccessIssue]

from jaxhet.compiler import GPU_COMPILER_OPTIONS, Job, Options, Plan, bridge, decompose, hlo
from tests.python.compiler import rocm_stubs
from tests.python.compiler.install_plugins import PLUGINS

_HERE = pathlib.Path(__file__).parent
_PACKAGES = {"cuda": "cuda13", "rocm": "rocm7"}
_TARGETS = {"cuda": "h100.txtpb", "rocm": "mi350x.txtpb"}
_COMPILER_OPTIONS = {**GPU_COMPILER_OPTIONS, "xla_gpu_autotune_level": 0}


@dataclasses.dataclass
class Compiler:
    """A vendor's compiler with our passes in it."""

    vendor: str
    c_api: Any
    job: Job | None = None
    options: Options = dataclasses.field(default_factory=Options)
    result: tuple[bytes, Plan] | None = None
    pass_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""

    @classmethod
    def load(cls, vendor: str) -> "Compiler":
        package = _PACKAGES[vendor]
        library = PLUGINS / "jax_plugins" / f"xla_{package}" / f"xla_{vendor}_plugin.so"
        xla_bridge._plugins_registered = True  # the plugins of PLUGINS are not for running
        sys.path.append(str(PLUGINS))
        if vendor == "rocm":
            rocm_stubs.load(library)
        c_api = xla_client.load_pjrt_plugin_dynamically(vendor, str(library))
        xla_client.initialize_pjrt_plugin(vendor)
        extension = importlib.import_module(f"jax_{package}_plugin.{vendor}_plugin_extension")
        xla_client.register_custom_call_handler(
            vendor.upper(), functools.partial(extension.register_custom_call_target, c_api)
        )
        for target in ("jaxhet_start", "jaxhet_done"):
            jax.ffi.register_ffi_target(target, _handler(), platform=vendor.upper())
        compiler = cls(vendor, c_api)
        _xla.register_xla_transform_c_api(c_api, "pre", 0, compiler._timed("pre", compiler._pre))
        _xla.register_xla_transform_c_api(c_api, "post", 1, compiler._timed("post", compiler._post))
        return compiler

    def _timed(
        self, name: str, hook: Callable[[bytes], bytes | None]
    ) -> Callable[[bytes], bytes | None]:
        def run(module: bytes) -> bytes | None:
            start = time.perf_counter()
            try:
                result = hook(module)
            except Exception:
                self.error = traceback.format_exc()
                raise
            if result is not None:
                self.pass_ms[name] = (time.perf_counter() - start) * 1e3
            return result

        return run

    def _pre(self, module: bytes) -> bytes | None:
        assert self.job is not None
        return decompose(module, self.job, self.options)

    def _post(self, module: bytes) -> bytes | None:
        assert self.job is not None
        bridged = bridge(module, self.job, self.options)
        if bridged is None:
            return None
        self.result = bridged
        return bridged[0]

    def compile(self, case: "Case") -> dict[str, Any]:
        config = (_HERE / "target_configs" / _TARGETS[self.vendor]).read_text()
        devices = xla_client.make_c_api_device_topology(
            self.c_api, self.vendor, target_config=config, topology=case.topology
        )._make_compile_only_devices()
        per_island = int(case.topology.split("x")[2])
        islands = tuple(rank // per_island for rank in range(len(devices)))
        self.job = Job(tuple(d.id for d in devices), islands, self.vendor)  # type: ignore[arg-type]
        self.options = case.options
        jax.clear_caches()
        start = time.perf_counter()
        lowered = case.lower(Mesh(np.array(devices), ("data",)))
        lowered.compile(compiler_options=_COMPILER_OPTIONS)
        assert self.result is not None
        module, plan = self.result
        return {
            "compile_s": time.perf_counter() - start,
            "pass_ms": dict(self.pass_ms),
            "fingerprint": plan.fingerprint,
            "lines": [e.line for e in plan.exchanges],
            "schedule": schedule(hlo.Module(module)),
        }


def _handler() -> Any:
    """A handler that is never called; compilers want one to exist."""
    return next(h for name, h in _lapack.registrations().items() if name.endswith("_ffi"))


def schedule(module: hlo.Module) -> list[list[tuple[str, int, int]]]:
    """For each computation, (what, index, bytes) in the order of its schedule."""
    result = []
    for computation_id, sequence in sorted(module.proto.schedule.sequences.items()):
        computation, events = module.computations[computation_id], []
        for instruction_id in sequence.instruction_ids:
            instruction = computation[instruction_id]
            if what := _event(module, instruction):
                index = _index(instruction)
                size = hlo.num_bytes(instruction.shape) if index >= 0 else 0
                events.append((what, index, size))
        result.append(events)
    return result


def _event(module: hlo.Module, instruction: hlo.Instruction) -> str | None:
    if instruction.opcode == "custom-call":
        target = instruction.custom_call_target
        return "matmul" if target.startswith("__cublas") else target
    called = [module.computations[i] for i in instruction.called_computation_ids]
    opcodes = {i.opcode for c in called for i in c.instructions}
    if instruction.opcode == "fusion":
        return "matmul" if "dot" in opcodes else None
    for opcode in ("reduce-scatter", "all-gather", "all-reduce", "collective-permute"):
        if instruction.opcode.startswith(opcode) or opcode in opcodes:
            return opcode
    return None


def _index(instruction: hlo.Instruction) -> int:
    if not instruction.custom_call_target.startswith("jaxhet_"):
        return -1
    text = json.loads(instruction.backend_config)["custom_call_backend_config"]["attributes"]
    return int(text.split("index = ")[1].split(" ")[0])


# --- programs ---


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to lower on a mesh; topology is islands x 1 x devices of each."""

    topology: str
    lower: Callable[[Mesh], Any]
    options: Options = dataclasses.field(default_factory=Options)


@jax.custom_vjp
def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer whose backward pass is one step: it gives both gradients together."""
    return jnp.tanh(x @ w)


def _layer_forward(x: jax.Array, w: jax.Array) -> Any:
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _layer_backward(saved: Any, dy: jax.Array) -> Any:
    x, w, y = saved
    dz = dy * (1 - y * y)
    return lax.optimization_barrier((dz @ w.T, x.T @ dz))


layer.defvjp(_layer_forward, _layer_backward)


def loss(params: Any, x: jax.Array) -> jax.Array:
    if isinstance(params, list):
        for w in params:
            x = layer(x, w)
    else:
        x = lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def shapes(mesh: Mesh, dtype: str, scan: bool) -> Any:
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    weight = jax.ShapeDtypeStruct((512, 512), dtype, sharding=replicated)
    stacked = jax.ShapeDtypeStruct((6, 512, 512), dtype, sharding=replicated)
    x = jax.ShapeDtypeStruct((1024 * mesh.size, 512), dtype, sharding=split)
    return stacked if scan else [weight] * 6, x


def train_step(mesh: Mesh, dtype: str = "float32", scan: bool = False) -> Any:
    """A data-parallel train step, the gradients summed by psum."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = lax.psum(jax.value_and_grad(loss)(params, x), "data")
        return jax.tree.map(lambda w, g: w - g * 0.5, params, grads), value

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(step, mesh=mesh, **specs)
    return jax.jit(mapped, donate_argnums=0).lower(*shapes(mesh, dtype, scan))


def train_step_sharded(mesh: Mesh, scan: bool = False) -> Any:
    """A data-parallel train step, the sums found by the partitioner."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of_plain_layers)(params, x)
        return jax.tree.map(lambda w, g: w - g * 0.5, params, grads), value

    out = NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    return jitted.lower(*shapes(mesh, "float32", scan))


def loss_of_plain_layers(params: Any, x: jax.Array) -> jax.Array:
    def plain(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    if isinstance(params, list):
        for w in params:
            x = plain(x, w)[0]
    else:
        x = lax.scan(plain, x, params)[0]
    return jnp.mean(x**2)


def reductions(mesh: Mesh) -> Any:
    """Every reducer, a type of each kind, odd sizes, a variadic all-reduce, and a loop."""

    def f(x: jax.Array) -> Any:
        y = x.astype(jnp.float32)
        tree = lax.psum((y, x.astype(jnp.int32), x.astype(jnp.int4)), "data")
        others = [lax.pmax(y, "data"), lax.pmin(x.astype(jnp.float8_e5m2), "data")]
        body = lambda c, _: (lax.psum(c, "data") * 0.5, None)  # noqa: E731
        return tree, others, lax.scan(body, y, None, length=3)[0]

    x = jax.ShapeDtypeStruct((mesh.size, 7), "bfloat16")
    spec = P("data")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(x)


CASES = {
    "train": Case("2x1x1", train_step),
    "train_text_order": Case("2x1x1", train_step, Options(order="text")),
    "train_bf16": Case("2x1x1", functools.partial(train_step, dtype="bfloat16")),
    "train_two_devices": Case("2x1x2", train_step),
    "train_sharded": Case("2x1x1", train_step_sharded),
    "train_sharded_scan": Case("2x1x1", functools.partial(train_step_sharded, scan=True)),
    "reductions": Case("2x1x1", reductions),
    "reductions_three_islands": Case("3x1x2", reductions),
    "reductions_flat": Case("2x1x2", reductions, Options(algorithm="flat")),
}


def main(vendor: str) -> None:
    compiler = Compiler.load(vendor)
    for name, case in CASES.items():
        try:
            result = compiler.compile(case)
        except Exception as error:  # reported with the others
            result = {"error": compiler.error or str(error)}
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
