"""Compiles programs with a vendor's real compiler and our passes, on a machine without a GPU.

A process of its own: `deviceless.py {cuda|rocm}` prints a line of JSON for each case: its name,
then plan and schedule.
"""

import collections
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import _handles
from jaxhet._pretended import deviceless
from jaxhet.compiler import Job, Options, collectives, hlo
from jaxhet.compiler.codecs import CODECS
from tests.python.compiler import moved, worker
from tests.python.compiler.install_plugins import PLUGINS
from tests.python.compiler.scheduled import schedule
from tests.python.compiler.train_steps import LOOP_OVER_LAYERS, TRAIN_STEPS


class Compiler(deviceless.Compiler):
    """A vendor's compiler with our passes in it; notes what exchanges move."""

    def __init__(self, vendor: deviceless.Vendor):
        super().__init__(vendor)
        self._moved: list[list[str]] = []
        self._operations: dict[str, int] = {}

    def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
        if (result := super().decompose(module, job, options)) is not None:
            self._moved = moved.of_module(hlo.Module(result), is_named=False)
            self._operations = _added(hlo.Module(module), hlo.Module(result))
        return result

    def compile_case(self, case: "Case") -> dict[str, Any]:
        islands, _, per_island = map(int, case.topology.split("x"))
        devices = self.devices(islands, per_island)
        jax.clear_caches()
        lowered = case.lower(Mesh(np.array(devices), ("data",)))
        result = self.compile(
            lowered,
            tuple(itertools.batched(devices, per_island)),
            case.options,
            codegen=case.codegen,
        )
        assert result is not None
        module, plan = hlo.Module(result[0]), result[1]
        ranks = sorted((d.id, rank // per_island) for rank, d in enumerate(devices))
        job = Job(tuple(i for i, _ in ranks), tuple(island for _, island in ranks), self.vendor)
        return {
            "fingerprint": plan.fingerprint,
            "lines": [e.line for e in plan.exchanges],
            "num_bytes": sum(e.num_bytes for e in plan.exchanges),
            "moved": self._moved,
            "operations": self._operations,
            "schedule": schedule(module),
            "copies": sum(i.opcode == "copy" for i in module.entry.instructions),
            "reordered": sum(_only_reorders(module, i) for i in module.entry.instructions),
            "crossing": [c.instruction.opcode for c in collectives.crossing(module, job)],
        }


def _added(before: hlo.Module, after: hlo.Module) -> dict[str, int]:
    """How many instructions of each operation and shape the pass adds; fewer than 0: removes."""

    def count(module: hlo.Module) -> collections.Counter[str]:
        return collections.Counter(
            f"{hlo.shape_text(i.shape)} {i.opcode}"
            for computation in module.computations.values()
            for i in computation.instructions
        )

    found = count(after)
    found.subtract(count(before))
    return {key: number for key, number in sorted(found.items()) if number}


def _only_reorders(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    """Whether a kernel does nothing but put elements in another order."""
    if instruction.opcode != "fusion":
        return instruction.opcode in ("copy", "transpose")
    (called,) = instruction.called_computation_ids
    opcodes = {i.opcode for i in module.computations[called].instructions}
    return opcodes <= {"bitcast", "copy", "parameter", "reshape", "transpose"}


# --- programs ---


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to lower on a mesh; topology is islands x 1 x devices of each."""

    topology: str
    lower: Callable[[Mesh], Any]
    options: Options = dataclasses.field(default_factory=Options)
    codegen: bool = True


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


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(x, w)
    return jnp.mean(x**2)


def shape(mesh: Mesh, *sizes: int, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32", sharding=NamedSharding(mesh, spec))


def train_step(mesh: Mesh) -> Any:
    """A data-parallel train step, the gradients summed by psum."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = lax.psum(jax.value_and_grad(loss)(params, x), "data")
        return jax.tree.map(lambda w, g: w - g * 0.5, params, grads), value

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(step, mesh=mesh, **specs)
    weights = [shape(mesh, 512, 512, spec=P())] * 6
    x = shape(mesh, 1024 * mesh.size, 512, spec=P("data"))
    return jax.jit(mapped, donate_argnums=0).lower(weights, x)


def train_step_sharded(mesh: Mesh) -> Any:
    """A data-parallel train step, the sums found by the partitioner."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of_plain_layers)(params, x)
        return jax.tree.map(lambda w, g: w - g * 0.5, params, grads), value

    out = NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
    x = shape(mesh, 1024 * mesh.size, 512, spec=P("data"))
    return jitted.lower(shape(mesh, 6, 512, 512, spec=P()), x)


def loss_of_plain_layers(params: jax.Array, x: jax.Array) -> jax.Array:
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]
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


def sums_over_unequal_groups(mesh: Mesh) -> Any:
    """All devices but the last one, then the first with the last one."""
    n = mesh.size
    unequal = [list(range(n - 1)), [n - 1]], [[0, n - 1], *([i] for i in range(1, n - 1))]

    def f(x: jax.Array) -> Any:
        return [lax.psum(x, "data", axis_index_groups=groups) for groups in unequal]

    spec = P("data")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((mesh.size, 7), "bfloat16"))


def long_sum(mesh: Mesh) -> Any:
    """A sum that comes in four parts."""
    mapped = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P(), out_specs=P())
    size = Options().part_bytes * 4 // 2 + 77
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((size,), "bfloat16"))


def large_exchanges(mesh: Mesh) -> Any:
    """Every collective that can be compressed."""

    def f(x: jax.Array) -> Any:
        y = lax.psum(jnp.tanh(x), "data")
        z = lax.psum_scatter(x * y, "data", tiled=True)
        ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
        return lax.ppermute(lax.all_gather(z, "data", tiled=True) + y, "data", ring)

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((4096, 516), "float32"))


def split_features(mesh: Mesh) -> Any:
    """Products whose operands are split along their last dimension, so that these are exchanged."""

    def f(x: jax.Array, small: jax.Array, large: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x @ small, "data", axis=2, tiled=True)
        summed = lax.psum_scatter(gathered @ large, "data", scatter_dimension=2, tiled=True)
        return summed @ small

    spec, size = P(None, None, "data"), 512 * mesh.size
    shapes = ((4, 256, size), (512, 512), (size, size))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))


def local_sum_in_loop(mesh: Mesh) -> Any:
    """XLA moves sums over "y" behind the loop, if it may: of gradients, and stored ones."""
    mesh = Mesh(mesh.devices.reshape(2, -1), ("x", "y"))

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            moved = lax.ppermute(jnp.tanh(h @ w), "x", [(0, 1), (1, 0)])
            return moved, lax.psum_scatter(h, "y", tiled=True)

        h, stored = lax.scan(body, x, None, length=4)
        return lax.pmean(jnp.sum(h**2), ("x", "y")), stored

    over_all = P(("x", "y"))
    out_specs = P(), P(None, *over_all)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(over_all, P("x")), out_specs=out_specs)
    x = jax.ShapeDtypeStruct((512, 256), "float32")
    return jax.jit(jax.grad(mapped, argnums=1, has_aux=True)).lower(x, x)


def handles(mesh: Mesh) -> Any:
    """The finish of one exchange and the start of the next, sharded inside islands as well."""
    mesh = Mesh(mesh.devices.reshape(3, -1), ("data", "model"))

    def f(handle: jaxhet.Handle, x: jax.Array) -> Any:
        mean = jaxhet.finish(handle)
        return mean, jaxhet.start(jnp.tanh(x) * mean, "data", name="f", wire="mxint4")

    def sharded(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P("data", None, "model") if x.ndim > 2 else P("data")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    x = sharded(jax.ShapeDtypeStruct((3, 64, 512), jnp.dtype("float32")))
    is_open = mock.patch.object(_handles, "_is_open", lambda size: size > 1)
    with jax.set_mesh(mesh), is_open:
        empty = functools.partial(_handles.not_started, axis="data", name="f", wire="mxint4")
        handle = jax.tree.map(sharded, jax.eval_shape(empty, x))
        return jax.jit(f).lower(handle, x)


CASES = {
    "handles": Case("3x1x2", handles),
    "long_sum": Case("2x1x1", long_sum),
    "split_features": Case("2x1x1", split_features, codegen=False),
    "local_sum_in_loop": Case("2x1x2", local_sum_in_loop),
    "train": Case("2x1x1", train_step),
    "train_two_devices": Case("2x1x2", train_step, codegen=False),
    "train_sharded_scan": Case("2x1x1", train_step_sharded),
    "train_one_world_kernels": Case("2x1x1", train_step_sharded, Options(one_world_kernels=True)),
    "train_loop_over_layers": Case("2x1x1", LOOP_OVER_LAYERS.lower, codegen=False),
    "reductions": Case("2x1x1", reductions),
    "reductions_three_islands": Case("3x1x2", reductions, codegen=False),
    "sums_over_unequal_groups": Case("2x1x2", sums_over_unequal_groups, codegen=False),
    "reductions_flat": Case("2x1x2", reductions, Options(algorithm="flat"), codegen=False),
}
CASES |= {
    f"wire_{codec}": Case(
        "2x1x2", large_exchanges, Options(wire=(("data", codec),)), codegen=codec == "mxint4"
    )
    for codec in CODECS
}
# Machine code is generated for one program of each kind: elsewhere it would take half of the time.
CASES |= {name: Case("2x1x2", step.lower, codegen=False) for name, step in TRAIN_STEPS.items()}


def main(vendor: deviceless.Vendor) -> None:
    sys.path.append(str(PLUGINS))
    worker.tell_each(CASES, Compiler(vendor).compile_case)


if __name__ == "__main__":
    main(cast(deviceless.Vendor, sys.argv[1]))
