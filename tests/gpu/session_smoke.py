"""A job's session on GPUs: one device set, sums over islands, JAX's own helpers, a checkpoint.

    jaxhet launch --islands 2 -- python tests/gpu/session_smoke.py [--double {mirror,vendor}]

`--double`: every process outside the first island plays another vendor (mirror_double.py); with
`vendor` to the engine as well, which needs the double of libamdhip64 in LD_LIBRARY_PATH. Process 0
prints a table; the exit code of a process that finds something wrong is 1. It runs on CPU devices
too, where JAX has nothing else.
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import make_mesh
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

SIZES = (0, 1, 7, 4099, 1 << 20)  # elements of each device


def rows(mesh: jax.sharding.Mesh, columns: int, dtype: Any) -> tuple[jax.Array, np.ndarray]:
    """A row of small integers on each device: the global array, and its values."""
    value = (np.arange(mesh.size * columns) % 13).reshape(mesh.size, columns).astype(dtype)
    sharding = NamedSharding(mesh, P("x"))
    return jax.make_array_from_callback(
        value.shape, sharding, lambda i: value[i], dtype=value.dtype
    ), value


def local(array: jax.Array) -> np.ndarray:
    return np.asarray(array.addressable_data(0))


def devices(mesh: jax.sharding.Mesh) -> str:
    assert len(jax.devices()) == mesh.size == len({d.id for d in jax.devices()})
    assert {d.process_index for d in jax.devices()} == set(range(jax.process_count()))
    kinds = dict.fromkeys(d.device_kind for d in jax.devices())
    return f"{mesh.size}: {', '.join(kinds)}"


def islands(mesh: jax.sharding.Mesh) -> str:
    found = jaxhet.islands()
    assert sorted(rank for island in found for rank in island.ranks) == list(range(mesh.size))
    assert sorted(p for island in found for p in island.processes) == list(
        range(jax.process_count())
    )
    return "; ".join(f"{i.name}: {i.platform}, ranks {i.ranks}" for i in found)


def psum(mesh: jax.sharding.Mesh) -> str:
    body = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False
    )
    step = jaxhet.jit(body)
    for columns in SIZES:
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
            array, value = rows(mesh, columns, dtype)
            total = local(jaxhet.block_until_ready(step(array)))
            np.testing.assert_array_equal(total, value.sum(0, keepdims=True).astype(dtype))
    return f"exact for {', '.join(map(str, SIZES))} elements of f32, bf16 and s32"


def partitioned(mesh: jax.sharding.Mesh) -> str:
    """A gradient of plain jax.jit, whose collectives XLA's partitioner finds."""
    array, value = rows(mesh, 64, jnp.float32)
    weight = jax.device_put(np.ones((64,), np.float32), NamedSharding(mesh, P()))
    grad = jax.jit(jax.grad(lambda w, x: jnp.sum(x @ w)), out_shardings=NamedSharding(mesh, P()))
    for _ in range(3):
        np.testing.assert_array_equal(local(grad(weight, array)), value.sum(0))
    return "jax.jit's gradient of sharded rows is exact"


def slices(mesh: jax.sharding.Mesh) -> str:
    """The island is JAX's slice, and sums over meshes that JAX makes of them are right."""
    if len(jaxhet.islands()) > 1:
        for island in jaxhet.islands():
            assert {d.slice_index for d in island.devices} == {island.index}
    num_slices = len(jaxhet.islands())
    shape = (mesh.size // num_slices,), (num_slices,)
    hybrid = mesh_utils.create_hybrid_device_mesh(*shape)
    for other in (
        make_mesh((mesh.size,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        Mesh(hybrid, ("x",)),
    ):
        array, value = rows(other, 7, jnp.float32)
        body = jax.shard_map(
            lambda x: jax.lax.psum(x, "x"), mesh=other, in_specs=P("x"), out_specs=P()
        )
        np.testing.assert_array_equal(local(jax.jit(body)(array)), value.sum(0, keepdims=True))
    return "sums over meshes of make_mesh and create_hybrid_device_mesh"


def device_put(mesh: jax.sharding.Mesh) -> str:
    """Arrays from one island to another and back, with exchanges of ours."""
    del mesh
    if len(jaxhet.islands()) == 1:
        return "one island"
    before, moves = jaxhet.stats()["exchanges_started"], 0
    one, other = (Mesh(np.array(island.devices), "x") for island in jaxhet.islands()[:2])
    for columns, dtype in zip(
        (1, 7, 4099, 1 << 20), (jnp.int8, jnp.bool_, jnp.bfloat16, jnp.float32), strict=True
    ):
        for spec in (P("x"), P()):
            x, value = rows(one, columns, dtype)
            for target in (NamedSharding(other, spec), NamedSharding(one, P("x"))):
                x = jax.device_put(x, target)
                moves += 1
                assert x.sharding == target
                for shard in x.addressable_shards:
                    np.testing.assert_array_equal(shard.data, value[shard.index])
    exchanges = jaxhet.stats()["exchanges_started"] - before
    assert exchanges > 0
    return f"{moves} arrays moved by {exchanges} exchanges"


def process_allgather(mesh: jax.sharding.Mesh) -> str:
    del mesh
    me = np.full((3,), jax.process_index(), np.int32)
    gathered = multihost_utils.process_allgather(me)
    np.testing.assert_array_equal(gathered[:, 0], np.arange(jax.process_count()))
    multihost_utils.sync_global_devices("smoke")
    return f"{gathered[:, 0].tolist()}, and sync_global_devices"


def checkpoint(mesh: jax.sharding.Mesh) -> str:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        return "skipped: no orbax here"
    array, value = rows(mesh, 8, jnp.float32)
    pid = int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))
    folder = pathlib.Path(tempfile.gettempdir(), f"jaxhet-smoke-{pid}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"x": array})
        checkpointer.wait_until_finished()
        target = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, P()))
        restored = checkpointer.restore(folder / "checkpoint", {"x": target})["x"]
    np.testing.assert_array_equal(local(restored), value)
    multihost_utils.sync_global_devices("restored")
    if jax.process_index() == 0:
        shutil.rmtree(folder)
    return "saved as rows, restored on every device"


def exchanges(mesh: jax.sharding.Mesh) -> str:
    del mesh
    assert jaxhet.last_error() is None
    stats = jaxhet.stats()
    assert len(jaxhet.islands()) == 1 or stats["exchanges_started"] > 0
    return ", ".join(f"{name} {value}" for name, value in stats.items() if value)


CHECKS: tuple[Callable[[jax.sharding.Mesh], str], ...] = (
    devices,
    islands,
    psum,
    partitioned,
    slices,
    device_put,
    process_allgather,
    checkpoint,
    exchanges,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--double", choices=("mirror", "vendor"))
    double = parser.parse_args().double
    if double and os.environ["JAXHET_ISLAND"] != os.environ["JAXHET_ISLANDS"].split(",")[0]:
        sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
        from tests.gpu import mirror_double

        mirror_double.install(as_vendor=double == "vendor")
    jaxhet.initialize()
    mesh = jaxhet.make_mesh({"x": -1})
    print(f"process {jax.process_index()} of {jax.process_count()}: {jax.local_devices()}")
    for check in CHECKS:
        found = check(mesh)
        if jax.process_index() == 0:
            print(f"{check.__name__:<18} ok  {found}")
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
