"""Flags of XLA and values of JAX's config that differ between the processes of a job."""

import os

import pytest
from two_islands import SET_UP

from tests.support.scripts import job, run

SUM = SET_UP + "print('sum', np.asarray(over_islands(psum)(x).addressable_shards[0].data)[0, 0])"


_PARTITION = """
import jax, jaxhet
from jax._src import distributed
jaxhet.initialize()
slices = [device.slice_index for device in jax.devices()]
print("partition", distributed.global_state.partition_index, "of", slices)
jaxhet.shutdown()
"""


def test_partition_that_jax_sees_is_the_island() -> None:
    envs = [{**e, "JAXHET_ISLAND": i} for e, i in zip(job(3), "aba", strict=True)]
    for ended, partition in zip(run(_PARTITION, *envs), (0, 1, 0), strict=True):
        assert ended.code == 0, ended.text
        assert f"partition {partition} of [0, 1, 0]\n" in ended.text


_SLICES = """
from jax import make_mesh
from jax._src import sharding_impls
from jax._src.test_util import create_mesh
from jax.experimental import mesh_utils
import jax, jaxhet, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jaxhet.initialize()
print("slices", [d.slice_index for d in jax.devices()], jax.local_devices()[0].slice_index)
ids = lambda devices: [[d.id for d in row] for row in devices]
hybrid = mesh_utils.create_hybrid_device_mesh((1, 2), (2, 1))
meshes = [
    make_mesh((2, 2), ("x", "y")),
    jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()),
    sharding_impls.make_mesh((2, 2), ("x", "y")),
    create_mesh((2, 2), ("x", "y")),
    Mesh(mesh_utils.create_device_mesh((2, 2)), ("x", "y")),
    Mesh(hybrid, ("x", "y")),
]
in_order, turned = ids(np.reshape(jax.devices(), (2, 2))), ids(hybrid)
assert [ids(mesh.devices) for mesh in meshes] == [in_order] * 5 + [turned]
assert turned == in_order[::-1], turned
assert [d.slice_index for d in hybrid[:, 0]] == [4, 5]
auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
assert make_mesh((4,), ("x",), (auto,)).axis_types == (auto,)
assert meshes[0].axis_types == (explicit, explicit)
assert make_mesh((1,), ("one",)).devices.tolist() == jax.devices()[:1]
for shape, names in (((4, 2), ("x", "y")), ((2, 2), ("x",))):
    try: raise AssertionError(make_mesh(shape, names))
    except ValueError as error: assert "must be >=" in str(error) or "to equal" in str(error)
a = np.arange(4.0)
for mesh in (meshes[0], meshes[-1]):
    where = NamedSharding(mesh, P(("x", "y")))
    x = jax.make_array_from_callback((4,), where, lambda i: a[i])
    body = lambda x: jax.lax.psum(x, "x")
    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("x", "y")), out_specs=P("y")))(x)
    print("sums", [float(s.data[0]) for s in y.addressable_shards])
jaxhet.shutdown()
"""


def test_meshes_of_the_slices_that_were_asked_for() -> None:
    common = {"JAX_NUM_CPU_DEVICES": "2"}
    given = ({"JAXHET_PARTITION_INDEX": "5"}, {"JAX_PARTITION_INDEX": "4"})
    envs = [{**env, **own} for env, own in zip(job(2, **common), given, strict=True)]
    for ended, own in zip(run(_SLICES, *envs), (5, 4), strict=True):
        assert ended.code == 0, ended.text
        assert f"slices [5, 5, 4, 4] {own}\n" + "sums [2.0, 4.0]\n" * 2 in ended.text


def test_difference_between_islands_is_reported_once_and_the_job_runs() -> None:
    devices = 1 + len(os.sched_getaffinity(0)) // 2  # too many for as many threads as CPUs
    common = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": str(devices)}
    one, other = [{**env, **common} for env in job()]
    first, second = run(SUM, one, {**other, "XLA_FLAGS": "--xla_cpu_max_isa=AVX"})
    line = (
        "jaxhet: island island1 differs from island0 in XLA_FLAGS --xla_cpu_max_isa: AVX, not set"
        " in island0; results of equal computations may differ in their last bits\n"
    )
    for ended, times in ((first, 1), (second, 0)):
        assert ended.code == 0, ended.text
        assert f"sum {2.0 * devices}" in ended.text
        assert ended.text.count(line) == times, ended.text
        assert ended.text.count(f"PJRT_NPROC={2 * devices} was set: XLA's CPU") == times


def test_setting_that_one_island_changes_later_is_named() -> None:
    script = """
try:
    with jax.numpy_dtype_promotion("strict" if me else "standard"):
        print("sum", jaxhet.block_until_ready(over_islands(psum)(x)))
except jaxhet.PlanMismatchError as e: print("caught:", e)
"""
    for ended in run(SET_UP + script, *job()):
        assert "sum" not in ended.text
        told = ended.text.split("caught:")[1]
        assert "runs another program of the same name, " in told
        assert "setting jax_numpy_dtype_promotion = strict" in told
        assert "setting jax_numpy_dtype_promotion = standard" in told


_KERNELS = """
import jaxhet
from jaxhet import _session
jaxhet.initialize()
print("one world's kernels", _session.current().config.one_world_kernels)
jaxhet.shutdown()
"""
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_one_worlds_kernels_are_kept_where_all_processes_have_deterministic_ones(
    other: str, kept: bool
) -> None:
    flags = (_DETERMINISTIC, other)
    envs = [{**env, "XLA_FLAGS": f} for env, f in zip(job(), flags, strict=True)]
    for ended in run(_KERNELS, *envs):
        assert ended.code == 0, ended.text
        assert f"one world's kernels {kept}\n" in ended.text
