"""One process of a job: what JAX's own functions give, as numpy trees, by name."""

import itertools
import pathlib
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import device_put_cases
import jax
import jax.numpy as jnp
import new_collectives
import numpy as np
import orbax.checkpoint as ocp
from device_put_cases import shards as _shards
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet


def _mesh() -> Mesh:
    """A mesh of two axes, the first of which crosses islands."""
    return jaxhet.make_mesh({"x": -1, "y": 2})


def _put(value: np.ndarray, spec: P, on: Mesh | None = None) -> jax.Array:
    """A global array from the same value on all processes."""
    return device_put_cases.put(value, NamedSharding(on or _mesh(), spec))


def _values(rows: int = 12, columns: int = 6) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def _mean_square(a: jax.Array) -> jax.Array:
    return jnp.mean(a * a)


# multihost_utils


def broadcast_one_to_all() -> Any:
    me = jax.process_index()
    tree = {"a": np.full((3,), me + 7.0, np.float32), "b": np.int32(me)}
    return (
        multihost_utils.broadcast_one_to_all(tree),
        multihost_utils.broadcast_one_to_all(tree, is_source=me == 1),
    )


def process_allgather() -> Any:
    me = jax.process_index()
    tree = {"a": np.full((2, 3), me, np.int32), "b": np.float32(me)}
    return (
        multihost_utils.process_allgather(tree),
        multihost_utils.process_allgather(tree, tiled=True),
        multihost_utils.process_allgather(_put(_values(), P("x", "y")), tiled=True),
    )


def sync_global_devices() -> Any:
    multihost_utils.sync_global_devices("here")
    multihost_utils.assert_equal({"a": np.arange(5), "b": 3}, "not reached")


def assert_equal_of_what_differs() -> Any:
    try:
        multihost_utils.assert_equal(jax.process_index(), "the processes differ")
    except AssertionError as error:
        return str(error).split(".")[0]


def host_local_arrays() -> Any:
    local = _values(4) + 100 * jax.process_index()
    on = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("p", "d"))
    array = multihost_utils.host_local_array_to_global_array(local, on, P("p"))
    back = multihost_utils.global_array_to_host_local_array(array * 2, on, P("p"))
    return _shards(array), np.asarray(back)


# Moving arrays


SPECS = (P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y"), P("x"), P())
# XLA's partitioner dies of these, with or without jaxhet.
NOT_IN_JIT = ({P("y", "x"), P(("x", "y"))},)


def device_put_is_exact() -> Any:
    for spec in SPECS:
        sharding = NamedSharding(_mesh(), spec)
        for source in (_values(24, 24), _put(_values(24, 24), P("x", "y"))):
            for shard in jax.device_put(source, sharding).addressable_shards:
                np.testing.assert_array_equal(shard.data, _values(24, 24)[shard.index])


def device_put_to_another_mesh_order() -> Any:
    turned = Mesh(_mesh().devices[::-1], ("x", "y"))
    return _shards(jax.device_put(_put(_values(), P("x", "y")), NamedSharding(turned, P("x", "y"))))


def large_sum() -> Any:
    """More than an exchange moves at once."""
    row = _put(np.arange(6 * 300_001, dtype=np.int32).reshape(6, -1), P(("x", "y")))
    return _shards(jax.jit(lambda a: a.sum(0))(row))


def random_numbers() -> Any:
    """Keys that are sharded, and numbers whose rows and columns are."""
    keys = jax.vmap(jax.random.key)(_put(np.arange(6, dtype=np.uint32), P(("x", "y"))))

    @jax.jit
    def sampled(keys: jax.Array) -> Any:
        whole = jax.random.bits(keys[0], (12, 8))
        return jax.vmap(jax.random.bits)(keys), jax.lax.with_sharding_constraint(
            whole, NamedSharding(_mesh(), P("x", "y"))
        ).max(0)

    return [_shards(array) for array in sampled(keys)]


def reshard_in_jit() -> Any:
    moved = []
    for source, target in itertools.product(SPECS, SPECS):
        if {source, target} not in NOT_IN_JIT:
            move = jax.jit(lambda a: a, out_shardings=NamedSharding(_mesh(), target))
            moved.append(_shards(move(_put(_values(), source))))
    return moved


def process_local_data() -> Any:
    local = _values(4) + 100 * jax.process_index()
    sharding = NamedSharding(_mesh(), P(("x", "y")))
    array = jax.make_array_from_process_local_data(sharding, local)
    return _shards(array), float(jax.jit(jnp.sum)(array))


def several_exchanges_of_one_operation() -> Any:
    """XLA's partitioner makes several collectives of one operation, and joins equal ones."""
    row = _put(np.arange(48, dtype=np.int32), P(("x", "y")))
    moved: list[jax.Array] = [
        jax.jit(lambda a: jax.lax.associative_scan(jnp.maximum, a))(row),
        jax.jit(lambda a: jnp.pad(a, 3, mode="wrap"))(row),
        *jax.jit(lambda a: (a.sum(), a.sum(), (a * 1).sum()))(row),
    ]
    for function in (
        lambda a: jnp.concatenate([a, a * 2, a], 1),
        lambda a: jnp.block([[a, a], [a, a]]),
        lambda a: jnp.pad(a, 2, mode="wrap"),
        lambda a: jnp.pad(a, 2, mode="symmetric"),
    ):
        for spec in (P("x", "y"), P(None, ("x", "y"))):
            moved.append(jax.jit(function)(_put(_values(24, 12), spec)))
    return [_shards(array) for array in moved]


# Meshes that JAX makes


def _sums(on: Mesh) -> Any:
    array = _put(_values(), P("x", "y"), on)
    sums = [
        jax.shard_map(
            lambda a, axis=axis: jax.lax.psum(a, axis),
            mesh=on,
            in_specs=P("x", "y"),
            out_specs=P(*(None if name == axis else name for name in "xy")),
        )
        for axis in "xy"
    ]
    return [_shards(jax.jit(sum_)(array)) for sum_ in sums], float(jax.jit(_mean_square)(array))


def hybrid_device_mesh() -> Any:
    """A mesh whose granules are processes: the CPU's devices have no slices."""
    devices = mesh_utils.create_hybrid_device_mesh(
        (1, jax.local_device_count()), (jax.process_count(), 1), process_is_granule=True
    )
    return [d.process_index for d in devices.flat], _sums(Mesh(devices, ("x", "y")))


def make_mesh_with_auto_axes() -> Any:
    sizes = (jax.process_count(), jax.local_device_count())
    return _sums(jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2))


def make_mesh_with_explicit_axes() -> Any:
    """Shardings that are types, from operation to operation, and an explicit change of one."""
    sizes = (jax.process_count(), jax.local_device_count())
    on = jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = []

    @jax.jit
    def product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = jnp.dot(a, b, out_sharding=P("x", None))
        moved = jax.sharding.reshard(c, P(None, "y"))
        specs.extend(str(jax.typeof(array)) for array in (a, b, c, moved, moved.sum(0)))
        return moved, jnp.sin(moved.sum(0))

    with jax.set_mesh(on):
        results = product(_put(_values(), P("x", "y"), on), _put(_values(6, 4), P("y", None), on))
    return specs, [_shards(array) for array in results]


def mesh_in_context() -> Any:
    """`jax.set_mesh` as a context: specs alone say where arrays lie."""
    sizes = (jax.process_count(), jax.local_device_count())
    with jax.set_mesh(jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2)):
        array = jax.device_put(_values(), P("x", "y"))
        move = jax.jit(lambda a: jax.lax.with_sharding_constraint(a * 2, P(None, "y")))
        body = lambda a: jax.lax.psum(a.sum(), ("x", "y"))  # noqa: E731
        total = jax.jit(jax.shard_map(body, in_specs=P("x", "y"), out_specs=P()))
        return _shards(move(array)), _shards(total(array))


# Compiling


def lower_and_compile() -> Any:
    array = _put(_values(), P("x", "y"))
    lowered = jax.jit(_mean_square).lower(array)
    compiled = lowered.compile()
    assert isinstance(lowered.as_text(), str)
    assert "HloModule" in (compiled.as_text() or "")
    assert compiled.memory_analysis() is not None
    return float(compiled(array)), float(compiled(array))


def stages_of_jaxhet_jit() -> Any:
    array = _put(_values(), P("x", "y"))
    f = jaxhet.jit(_mean_square, bridge={"deadline_s": 100})
    traced, lowered = f.trace(array), f.lower(array)
    compiled = lowered.compile()
    assert compiled.cost_analysis()
    assert jax.tree.leaves(compiled.in_tree)
    exported = jax.export.export(f)(array)
    results = [f, traced.lower().compile(), compiled, jaxhet.jit(exported.call)]
    return [float(result(array)) for result in results]


def clear_caches() -> Any:
    array = _put(_values(), P("x", "y"))
    f = jax.jit(_mean_square)
    before = float(f(array))
    jax.clear_caches()
    return before, float(f(array))


def profiler_trace() -> Any:
    """Names of events in a trace of a program that crosses islands."""
    f = jax.jit(_mean_square)
    array = _put(_values(), P("x", "y"))
    f(array).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            f(array).block_until_ready()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    names = {e.name for plane in data.planes for line in plane.lines for e in line.events}
    return sorted(name for name in names if "jaxhet" in name)


# Checkpoints


def orbax(folder: str) -> Any:
    """Saved in one layout, restored in another."""
    tree = {"w": _put(_values(), P("x", "y")), "step": _put(np.array([7], np.int32), P())}
    targets = {"w": P("y", None), "step": P()}
    path = pathlib.Path(folder, "checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        abstract = {
            key: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=NamedSharding(_mesh(), targets[key])
            )
            for key, array in tree.items()
        }
        restored = checkpointer.restore(path, abstract)
    return {key: _shards(array) for key, array in restored.items()}


def orbax_without_async(folder: str) -> Any:
    """Saved by a manager whose threads call `sync_global_devices`."""
    tree = {"w": _put(_values(), P("x", "y"))}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(pathlib.Path(folder, "managed"), options=options) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.StandardSave(tree))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = manager.restore(1, args=ocp.args.StandardRestore(abstract))
    return {key: _shards(array) for key, array in restored.items()}


# All functions above, and more in `ON_ISLANDS` that JAX refuses in one world on CPUs.
NAMED: dict[str, Callable[..., Any]] = new_collectives.NAMED | {
    name: function
    for name, function in globals().items()
    if name[0] != "_" and getattr(function, "__module__", "") == __name__
}
ON_ISLANDS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        device_put_cases.move_all,
        device_put_cases.as_jax_does,
        device_put_cases.refusal_of_host_memory,
        device_put_cases.refusal_of_a_device,
    )
}


def answer(name: str, *arguments: Any) -> Any:
    """(process, value, error)."""
    me = jax.process_index()
    try:
        return me, jax.device_get({**NAMED, **ON_ISLANDS}[name](*arguments)), None
    except Exception:
        return me, None, traceback.format_exc()
