"""Runs programs over pretended islands, all ranks in this process, and compares with plain JAX.

`one_process.py [--all]` runs as a process of its own and prints a line of JSON for each case: its
name, and what differed. Without `--all` it runs fewer islands and algorithms.
"""

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.extend.xla
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet import _config, _ffi
from jaxhet._jax import programs as _jax_programs
from jaxhet._traced import jaxprs
from jaxhet.compiler import PROGRAM_ATTRIBUTE, Job, Options, Plan, bridge, decompose
from jaxhet.compiler.carrier import CARRIERS
from tests.python.compiler import gpu_on_cpu
from tests.support.members import described

NUM_RANKS = 4
ALGORITHMS = {
    "flat": Options(),
    "two_shot": Options(two_shot_bytes=0),
    "hierarchical": Options(algorithm="hierarchical"),
    "hierarchical_two_shot": Options(algorithm="hierarchical", two_shot_bytes=0),
    "gpu": Options(part_bytes=256),
    "gpu_flat": Options(algorithm="flat"),
    "gpu_one_world": Options(one_world_kernels=True),
}
ISLANDS = {
    "2+2": (0, 0, 1, 1),
    "1+1+2": (0, 1, 2, 2),
    "1+3": (0, 1, 1, 1),
    "mixed": (0, 1, 0, 1),
    "each": (0, 1, 2, 3),
}


@dataclasses.dataclass
class World:
    """The engine of this process, and how modules are compiled now."""

    engine: Any
    islands: tuple[int, ...] | None = None  # None: plain JAX
    options: Options = dataclasses.field(default_factory=Options)
    plans: list[Plan] = dataclasses.field(default_factory=list)
    as_gpu: bool = False  # the GPU form, whose exchanges XLA does
    pretended: int = 0  # exchanges compiled in that form

    @classmethod
    def make(cls) -> Self:
        jax.config.update("jax_num_cpu_devices", NUM_RANKS)
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        engine = _ffi.Engine(_config.PlacedConfig(), [described()], {})
        engine._engine.start(1000)
        engine.set_ranks([(d.id, 0, 0, "cpu") for d in jax.devices()])
        _ffi.register_handlers("cpu")
        _jax_programs.watch_lowering(
            jaxprs.labels,
            jaxprs.argument_labels,
            lambda *p: jaxprs.describe(*p).digest,
            PROGRAM_ATTRIBUTE,
        )
        world = cls(engine)
        stages = jax.extend.xla.PipelineStage
        for name, hook, stage in (
            ("pre", world._pre, stages.PRE_SCHEDULER),
            ("post", world._post, stages.POST_SCHEDULER),
        ):
            jax.extend.xla.register_hlo_module_transformation(
                hook, name=name, stage=stage, platforms="cpu"
            )
        return world

    def _job(self) -> Job:
        ids = tuple(d.id for d in jax.devices())
        return Job(ids, self.islands or (), "cpu", self.engine.session)

    def _pre(self, module: bytes) -> bytes | None:
        if not self.islands:
            return None
        if not self.as_gpu:
            return decompose(module, self._job(), self.options)
        return self.decomposed_for_gpus(module, dataclasses.replace(self._job(), platform="cuda"))

    def decomposed_for_gpus(self, module: bytes, job: Job) -> bytes | None:
        """The GPU form of a module, whose exchanges XLA does."""
        decomposed = decompose(gpu_on_cpu.unfused(module, "dynamic-slice"), job, self.options)
        if decomposed is None:
            return None
        self.pretended += sum(decomposed.count(opcode.encode()) for opcode in CARRIERS)
        return gpu_on_cpu.to_cpu(decomposed)

    def _post(self, module: bytes) -> bytes | None:
        if not self.islands or self.as_gpu:
            return None
        bridged = bridge(module, self._job())
        if bridged is None:
            return None
        changed, plan = bridged
        self.engine.register_plan(plan.fingerprint, plan.text, plan.movements)
        self.plans.append(plan)
        return changed

    @contextlib.contextmanager
    def compiled_as(
        self, islands: tuple[int, ...] | None, options: Options, as_gpu: bool = False
    ) -> Iterator[None]:
        jax.clear_caches()
        self.islands, self.options, self.as_gpu = islands, options, as_gpu
        try:
            yield
        finally:
            self.islands = None

    def exchanges(self) -> int:
        return self.engine.stats()["exchanges_completed"] + self.pretended


# --- programs: functions without arguments that return arrays. The result of a psum is returned
# sharded over all devices, so that the results of all ranks are compared ---

Program = Callable[[], Any]


def mesh(order: tuple[int, ...] = (0, 1, 2, 3), shape: tuple[int, ...] = (2, 2)) -> Mesh:
    devices = np.array(jax.devices())[list(order)].reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def mapped(f: Callable[..., Any], x: Any, on: Mesh | None = None) -> Program:
    on = on or mesh()
    spec = P(on.axis_names)

    def run() -> Any:
        return jax.jit(jax.shard_map(f, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))(x)

    return run


def integers(dtype: str, rows: int, columns: int = 5) -> jax.Array:
    """Small whole numbers, so that sums are exact in any order."""
    values = np.random.default_rng(0).integers(0, 2 if "2" in dtype[-1] else 3, (rows, columns))
    return jnp.asarray(values).astype(dtype)


# Sizes of elements, what XLA promotes on CPU, and what FFI has no type for. All others are in
# tests/multiprocess/test_collective_matrix.py.
DTYPES = ("bool", "int4", "uint16", "bfloat16", "float32", "complex64", "float8_e5m2")


def reductions(dtype: str) -> Program:
    """Every reducer that fits the type, over one axis and over two; odd sizes."""
    reducers = [lax.psum, lax.pmax, lax.pmin]
    if dtype == "bool":
        reducers = [lambda x, axes: lax.pmax(x.astype(jnp.int32), axes).astype(bool)]
    elif dtype.startswith("complex"):
        reducers = [lax.psum]

    def f(*xs: jax.Array) -> Any:
        return [r(x, axes) for x in xs for r in reducers for axes in ("x", ("x", "y"))]

    return mapped(lambda x: f(x[:1, :1], x), integers(dtype, NUM_RANKS * 3, 7))


def unequal_groups() -> Program:
    """Reductions over groups of unequal size."""
    groups = [[0, 1, 2], [3]], [[0], [1, 2, 3]], [[0, 3], [1], [2]]

    def f(x: jax.Array, y: jax.Array) -> Any:
        sums = [lax.psum(v, "x", axis_index_groups=g) for g in groups for v in (x, y)]
        return [*sums, lax.pmin(x, "x", axis_index_groups=groups[0])]

    on = mesh((2, 0, 3, 1), (4,))
    xs = [integers(dtype, NUM_RANKS, 1103) for dtype in ("float32", "bfloat16")]
    g = jax.shard_map(f, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return lambda: jax.jit(g)(*xs)


def long_sums() -> Program:
    """Sums of vectors of odd lengths."""

    def f(*xs: jax.Array) -> Any:
        return [lax.psum(x, axes) for x in xs for axes in ("x", "y", ("x", "y"))]

    xs = [integers(d, NUM_RANKS, 1103) for d in ("int8", "bfloat16", "float32", "complex64")]
    spec = P(mesh().axis_names)
    g = jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
    return lambda: jax.jit(g)(*xs)


def sharded_reductions() -> Program:
    """Sum, product, and, or, min, max as the partitioner emits them."""
    x = jax.device_put(integers("float32", 8, 8) + 1, NamedSharding(mesh(), P("x", "y")))
    f = jax.jit(lambda x: (x.sum(), x.prod(0), (x > 1).all(), (x > 2).any(1), x.min(), x.max(0)))
    return lambda: f(x)


def special_values() -> Program:
    """NaN, infinities, zeros, denormals, overflow; over pairs, where the order has no effect."""
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.0]
    pairs = np.array([[a, b] for a in special for b in special], np.float32).T
    x = jnp.asarray(np.concatenate([pairs, pairs]))
    y = jnp.asarray(np.full((4, 3), np.iinfo(np.int32).max, np.int32))
    on = mesh((0, 2, 1, 3))
    return lambda: (
        mapped(lambda x: lax.psum(x, "y"), x, on)(),
        mapped(lambda y: lax.psum(y, "y"), y)(),
    )


def loops(x: jax.Array) -> Any:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        inner = lax.fori_loop(0, 2, lambda _, d: lax.psum(d, "x") * 0.5, c)
        return inner + lax.pmax(c, "y"), lax.psum(c.sum(), ("x", "y"))[None]

    c, sums = lax.scan(body, x, None, length=3)
    return lax.while_loop(
        lambda c: lax.psum(c.sum(), ("x", "y")) < 1e6, lambda c: c * 2 + 1, c
    ), sums


def branches(x: jax.Array) -> Any:
    chosen = lax.psum((x[0, 0] > 0).astype(jnp.int32), ("x", "y")) > 1
    return lax.cond(chosen, lambda x: lax.psum(x, "x"), lambda x: lax.pmax(x, ("x", "y")), x)


def rematerialized(x: jax.Array) -> Any:
    @jax.checkpoint
    def f(w: jax.Array) -> jax.Array:
        return lax.psum(w * w, "x").sum()

    return jax.grad(lambda w: f(w) + f(w * 2))(x)


def sums_of_everything(x: jax.Array) -> Any:
    nothing = lax.psum(x[:, :0], "x")
    tree = lax.psum((x, x.astype(jnp.int32), x.astype(jnp.bfloat16)), "x")
    return nothing, tree, lax.psum(x, ("y", "x")), jax.vmap(lambda r: lax.psum(r, "y"))(x), x.T @ x


def movements(dtype: str) -> Program:
    """Every collective that moves, over one axis and over two, along each dimension; odd sizes."""

    def f(x: jax.Array) -> Any:
        results = []
        for axes, n in (("x", 2), ("y", 2), (("x", "y"), 4)):
            ring = [(i, (i + 1) % n) for i in range(n)]
            results += [
                lax.all_gather(x, axes, axis=0, tiled=True),
                lax.all_gather(x, axes, axis=1),
                lax.all_to_all(x, axes, 0, 1, tiled=True),
                lax.all_to_all(x, axes, 1, 0, tiled=True),
                lax.all_to_all(x, axes, 1, 1, tiled=True),
                lax.all_gather(x, ("y", "x"), tiled=True),
                lax.ppermute(x, axes, ring),
                lax.ppermute(x, axes, ring[1:]),
                lax.ppermute(x, axes, [(n - 1, 0)]),
            ]
        return results

    return mapped(f, integers(dtype, NUM_RANKS * 4, 12))


def scatters(dtype: str) -> Program:
    """Reduce-scatters over one axis and over two, along each dimension."""

    def f(x: jax.Array) -> Any:
        return [
            lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
            for axes in ("x", "y", ("x", "y"), ("y", "x"))
            for dim in (0, 1)
        ]

    return mapped(f, integers(dtype, NUM_RANKS * 4, 12))


def other_layouts(x: jax.Array) -> Any:
    """Gathers and scatters of arrays that lie column-major in memory."""
    y = x.T
    rows = lax.all_gather(y, "x", axis=0, tiled=True), lax.all_gather(y, ("x", "y"), axis=1)
    scattered = lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True).T
    swapped = lax.all_to_all(y, ("x", "y"), 0, 1, tiled=True).T
    cube = jnp.transpose(x.reshape(2, x.shape[0] // 2, x.shape[1]), (2, 0, 1))
    moved = lax.ppermute(cube, "x", [(0, 1), (1, 0)]), lax.all_to_all(cube, "x", 1, 0, tiled=True)
    return rows, scattered, swapped, moved, lax.psum(cube, ("x", "y"))


def broadcasts(world: World) -> Program:
    """XLA's CPU backend has no broadcast: the result is compared with a gather from the source."""
    mlir.register_lowering(parallel.pbroadcast_p, parallel._pbroadcast_lowering, platform="cpu")

    def from_source(x: jax.Array, axes: Any, source: int) -> jax.Array:
        return lax.pbroadcast(x, axes, source) if world.islands else lax.all_gather(x, axes)[source]

    def f(x: jax.Array) -> Any:
        sources = [("x", 0), ("x", 1), *((("x", "y"), source) for source in range(NUM_RANKS))]
        return [from_source(x, *case) for case in sources]

    return mapped(f, integers("bfloat16", 12, 7))


def kept_blocks() -> Program:
    """All-reduces of which each device keeps a block, as gradients of sharded parameters are.

    A program for each: XLA's CPU compiler puts all-reduces together.
    """

    def kept(x: jax.Array, axes: Any, dim: int) -> jax.Array:
        size = x.shape[dim] // lax.axis_size(axes)
        return lax.dynamic_slice_in_dim(lax.psum(x, axes), lax.axis_index(axes) * size, size, dim)

    def wrapped(x: jax.Array) -> jax.Array:
        """Device 2 keeps block 1: the products are 0, 100, -56 and 44."""
        own = lax.axis_index(("x", "y"))
        block = jnp.where((own * 100).astype(jnp.int8).astype(int) < 0, 3 - own, own)
        return lax.dynamic_slice_in_dim(lax.psum(x, ("x", "y")), block * 2, 2)

    programs = [
        wrapped,
        *(
            functools.partial(kept, axes=axes, dim=dim)
            for axes in ("x", "y", ("x", "y"))
            for dim in (0, 1)
        ),
        lambda x: lax.psum(kept(x, "x", 0), "y"),
        lambda x: lax.psum(kept(x, "y", 1), "x"),
        lambda x: lax.pmax(kept(x, "x", 1), "y"),
    ]
    x = integers("float32", 32, 12)
    return lambda: [mapped(program, x)() for program in programs]


def resharded(is_thorough: bool) -> Program:
    """Moves between shardings, with any collectives that the partitioner chooses."""
    specs = [P("x", "y"), P("y", "x"), P(None, ("y", "x")), P("y"), P()]
    if is_thorough:
        specs += [P(("x", "y")), P(None, "x")]
    on = mesh()
    x = integers("float32", 8, 16) * 3 + jnp.arange(16)

    def run() -> Any:
        results = []
        for before in specs:
            y = jax.device_put(x, NamedSharding(on, before))
            for after in specs:
                z = jax.jit(lambda v: v * 2, out_shardings=NamedSharding(on, after))(y)
                results += [shard.data for shard in z.addressable_shards]
        return results

    return run


def moves_in_control_flow(x: jax.Array) -> Any:
    ring = [(0, 1), (1, 0)]

    def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c = lax.ppermute(c, "x", ring) + 1
        g = lax.all_gather(c, "y", tiled=True)
        return lax.psum_scatter(g, "x", tiled=True), lax.all_to_all(c, "x", 1, 1, tiled=True)

    c, moved = lax.scan(body, x, None, length=3)
    chosen = lax.psum((x[0, 0] > 0).astype(jnp.int32), ("x", "y")) > 1
    branch = lax.cond(
        chosen, lambda v: lax.ppermute(v, "y", ring), lambda v: lax.pshuffle(v, "x", [1, 0]), c
    )
    nothing = lax.all_gather(x[:0], "x"), lax.ppermute(x[:, :0], "x", ring)
    return moved, branch, nothing


def gradients_of_moves(x: jax.Array) -> Any:
    def f(w: jax.Array) -> jax.Array:
        g = lax.all_gather(w, ("x", "y"), tiled=True) * 2
        s = lax.psum_scatter(g * g, "x", tiled=True)
        t = lax.all_to_all(s, "y", 0, 1, tiled=True)
        return jnp.sum(lax.ppermute(t, "x", [(0, 1), (1, 0)]) ** 2)

    return jax.grad(f)(x)


def train(dtype: str) -> Program:
    """Three steps with donation; the replicated result once for each device."""
    replicated, split = NamedSharding(mesh(), P()), NamedSharding(mesh(), P(("x", "y")))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - 1) ** 2)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=replicated)
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.25 * jax.grad(loss)(w, x)

    def run() -> Any:
        w = jax.device_put(jnp.ones((4, 4), dtype), replicated)
        x = jax.device_put(integers(dtype, 8, 4), split)
        for _ in range(3):
            w = step(w, x)
        return [shard.data for shard in w.addressable_shards]

    return run


def cases(world: World, is_thorough: bool) -> dict[str, Program]:
    x = integers("float32", 8)
    six_rows = jnp.asarray(np.arange(18.0, dtype=np.float32).reshape(6, 3))
    return {
        **{f"reductions_{d}": reductions(d) for d in DTYPES},
        **{f"train_{d}": train(d) for d in ("float32", "bfloat16", "float16")},
        **{f"movements_{d}": movements(d) for d in DTYPES},
        **{f"scatters_{d}": scatters(d) for d in ("int32", "float32", "bfloat16", "complex64")},
        "other_layouts": mapped(other_layouts, integers("float32", 32, 8)),
        "broadcasts": broadcasts(world),
        "kept_blocks": kept_blocks(),
        "resharded": resharded(is_thorough),
        "moves_in_control_flow": mapped(moves_in_control_flow, integers("float32", 16, 8)),
        "gradients_of_moves": mapped(gradients_of_moves, integers("float32", 16, 8)),
        "long_sums": long_sums(),
        "unequal_groups": unequal_groups(),
        "sharded_reductions": sharded_reductions(),
        "special_values": special_values(),
        "loops": mapped(loops, x),
        "branches": mapped(branches, x - 1),
        "rematerialized": mapped(rematerialized, x),
        "sums_of_everything": mapped(sums_of_everything, x),
        "permuted_mesh": mapped(sums_of_everything, x, mesh((2, 0, 3, 1))),
        "reversed_mesh": mapped(sums_of_everything, x, mesh((3, 2, 1, 0))),
        "subset_mesh": mapped(lambda x: lax.psum(x, "x"), six_rows, mesh((3, 0, 2), (3,))),
    }


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal to the bit, up to the bits of a NaN and the sign of a zero.

    XLA's all-reduce within a process begins with +0, so that -0 + -0 = +0; Gloo's does not.
    """
    if a.tobytes() == b.tobytes():
        return True
    special = (np.isnan(a) & np.isnan(b)) | ((a == 0) & (b == 0))
    return a[~special].tobytes() == b[~special].tobytes()


def differences(want: Any, got: Any) -> list[str]:
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return [
        f"result {i}: {np.asarray(w).ravel()[:6]} != {np.asarray(g).ravel()[:6]}"
        for i, (w, g) in enumerate(pairs)
        if not same_bits(np.asarray(w), np.asarray(g))
    ]


def variants(name: str, is_thorough: bool) -> list[tuple[str, str]]:
    """The islands and algorithms that a case runs with: all for some, few for each type."""
    if name.startswith(("reductions", "movements", "train")) and not name.endswith("_float32"):
        as_gpu = name.endswith(("bool", "int4", "_bfloat16", "complex64", "e5m2"))
        return [
            ("2+2", "flat"),
            *([("2+2", "hierarchical_two_shot")] if as_gpu or is_thorough else []),
            *([("mixed", "gpu")] if as_gpu else []),
        ]
    if name == "broadcasts":  # XLA has none for CPUs inside an island, as the GPU form needs
        return [("each", "gpu")]
    if name == "unequal_groups":
        return [("1+3", "gpu"), *([("2+2", "hierarchical_two_shot")] if is_thorough else [])]
    if name == "rematerialized":  # over one axis only
        return [("2+2", algorithm) for algorithm in ALGORITHMS]
    if name == "sums_of_everything":
        shapes = ISLANDS.keys() - {"each"} if is_thorough else ("mixed",)
        return [(shape, algorithm) for shape in sorted(shapes) for algorithm in ALGORITHMS]
    few = [("2+2", "hierarchical"), ("1+1+2", "flat"), ("mixed", "gpu")]
    more = [
        ("2+2", "two_shot"),
        ("2+2", "gpu"),
        ("1+1+2", "gpu"),
        ("mixed", "gpu_flat"),
        ("2+2", "gpu_one_world"),
    ]
    return [*few, *more] if is_thorough else few


def check(
    world: World, program: Program, islands_and_algorithms: list[tuple[str, str]]
) -> list[str]:
    with world.compiled_as(None, Options()):
        want = jax.device_get(program())
    failures = []
    for shape, algorithm in islands_and_algorithms:
        before = world.exchanges()
        try:
            as_gpu = algorithm.startswith("gpu")
            with world.compiled_as(ISLANDS[shape], ALGORITHMS[algorithm], as_gpu):
                found = differences(want, jax.device_get(program()))
        except Exception as error:  # reported with the others
            found = [str(error)[-600:]]
        if world.exchanges() == before:
            found.append("no exchange")
        failures += [f"{shape} {algorithm}: {text}" for text in found]
    return failures


def main() -> None:
    world, is_thorough = World.make(), "--all" in sys.argv
    for name, program in cases(world, is_thorough).items():
        found = check(world, program, variants(name, is_thorough))
        print(json.dumps([name, found]), flush=True)
    world.engine.close(1000)


if __name__ == "__main__":
    main()
