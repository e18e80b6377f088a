"""Replicas over two islands: what differs is found, named and made equal, to the bit."""

from typing import Any

from two_islands import SET_UP
from two_islands import told as told_by

from tests.support.scripts import job, run

# A mesh of 2 islands x 2 devices. `array` takes what each of the 4 devices holds.
TOOLS = """
import warnings
import ml_dtypes
mesh = jaxhet.make_mesh({"island": 2, "device": 2})

def array(blocks, spec=P()):
    sharding = NamedSharding(mesh, spec)
    own = [jax.device_put(block, device) for block, device in zip(blocks, mesh.devices.flat)
           if device.process_index == me]
    parts = [1 if not spec or spec[0] is None else mesh.shape[spec[0]]]
    shape = (parts[0] * blocks[0].shape[0], *blocks[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, own)

def bits(*words): return np.array(words, np.uint32).view(np.float32)
def differences(report): return {d.leaf: [list(d.islands), d.largest] for d in report.differences}
row = np.arange(8, dtype=np.float32)
other = row.copy(); other[3] += 0.5
swapped = row[::-1].copy()
"""


def told(script: str, *envs: dict[str, str]) -> dict[str, Any]:
    """Output of both processes, which must be equal."""
    one, other = told_by(run(SET_UP + TOOLS + script, *envs, timeout_s=120))
    assert one == other
    return one


def test_differences_are_found_named_and_healed() -> None:
    script = """
dtypes = ["float32", "bfloat16", "float16", "int32", "int8", "uint16", "complex64", "int4",
          "float8_e4m3fn"]
changed = {d: array([row.astype(d)] * 3 + [(row + (row == 3)).astype(d)]) for d in dtypes}
tree = {
    "equal": array([row] * 4),
    "one": array([row, row, other, row]),
    "island 1": array([row, row, other, other]),
    "first is other": array([other, row, row, row]),
    "order": array([row, row, row, swapped]),
    "zero": array([row, row, row, np.where(row == 0, np.float32(-0.0), row)]),
    "nan": array([bits(0x7fc00000)] * 3 + [bits(0x7fc00001)]),
    "infinity": array([bits(0x7f800000)] * 3 + [bits(0x7fc00000)]),
    "bool": array([row > 2, row > 2, row > 2, row > 3]),
    "split": array([row, other, row, swapped], P("device")),
    "split over islands": array([row, other, swapped, row], P("island")),
    "key": jax.jit(lambda: jax.random.key(1), out_shardings=NamedSharding(mesh, P()))(),
    "number": 3, "numpy": row * me, "local": jnp.asarray(row) * me,
    "dtypes": changed,
}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    report = jaxhet.check_replicas(tree, on_difference="warn")
try: raised = repr(jaxhet.check_replicas(tree))
except jaxhet.ReplicaError as e: raised = str(e)
try: jaxhet.check_replicas({}, on_difference="ask")
except jaxhet.UsageError as e: refused = str(e)
synced = jaxhet.check_replicas(tree, on_difference="sync")
own = {k: np.asarray(synced.tree[k].addressable_data(1)).tobytes().hex()
       for k in ("zero", "nan", "one", "first is other")}
tell(compared=report.num_compared, differences=differences(report), warned=len(caught),
     raised=raised, refused=refused, unlike=jaxhet.unlike_islands(),
     again=differences(jaxhet.check_replicas(synced.tree)),
     kept=[synced.tree["equal"] is tree["equal"], synced.tree["number"]],
     types=[str(synced.tree["dtypes"][d].dtype) == d for d in dtypes], own=own)
"""
    found = told(script, *job(2, JAXHET_CPU_DEVICES="2"))
    differences = found["differences"]
    dtypes = {name: value for name, value in differences.items() if "dtypes" in name}
    for name, value in dtypes.items():
        assert value == [["island1"], 1.0], name
    assert len(dtypes) == 9
    assert {name: v for name, v in differences.items() if name not in dtypes} == {
        "['one']": [["island1"], 0.5],
        "['island 1']": [["island1"], 0.5],
        "['first is other']": [["island0", "island1"], 0.5],
        "['order']": [["island1"], 7.0],
        "['zero']": [["island1"], 0.0],
        "['nan']": [["island1"], 0.0],
        "['infinity']": [["island1"], float("inf")],
        "['bool']": [["island1"], 1.0],
        "['split']": [["island1"], 7.0],
        "['split over islands']": [["island0", "island1"], 7.0],
    }
    assert found["compared"] == 12 + 9
    assert found["warned"] == 1
    assert found["raised"].startswith("replicas differ in 19 of 21 leaves: ['bool'] (on island1;")
    assert "and 11 more" in found["raised"]
    assert "jaxhet.sync_replicas" in found["raised"]
    assert "on_difference='ask' is not one of raise, warn, sync" in found["refused"]
    assert found["unlike"] == []
    assert found["again"] == {}
    assert found["kept"] == [True, 3]
    assert all(found["types"])
    # The first replica's bits, also where the own ones were numerically equal.
    assert found["own"]["zero"].startswith("00000000")
    assert found["own"]["nan"] == "0000c07f"


def test_island_without_fma_is_unlike_and_its_replicas_can_be_made_equal() -> None:
    script = """
init = jaxhet.jit(lambda: {"normal": jax.random.normal(jax.random.key(0), (64, 64)),
                           "ones": jnp.ones(3)}, out_shardings=NamedSharding(mesh, P()))
tree = init()
tell(before=differences(jaxhet.check_replicas(tree, on_difference="sync")),
     after=differences(jaxhet.check_replicas(jaxhet.sync_replicas(tree))),
     unlike=jaxhet.unlike_islands(), again=jaxhet.unlike_islands())
"""
    one, other = job(2, JAXHET_CPU_DEVICES="2")
    found = told(script, one, {**other, "XLA_FLAGS": "--xla_cpu_max_isa=AVX"})
    assert list(found["before"]) == ["['normal']"]
    (islands, largest) = found["before"]["['normal']"]
    assert islands == ["island1"]
    assert 0 < largest < 1e-5
    assert found["after"] == {}
    flags, arithmetic = found["unlike"]
    assert "island island1 differs from island0 in XLA_FLAGS --xla_cpu_max_isa" in flags
    assert arithmetic.startswith("the arithmetic of island1 is not that of island0: ")
    assert "multiply and add" in arithmetic
    assert "exponential" in arithmetic
    assert found["again"] == found["unlike"]


def test_one_process_needs_no_job_and_arrays_without_replicas_are_refused_by_name() -> None:
    script = """
import jax, numpy as np, jaxhet
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
rows = [jax.device_put(np.full(3, i // 3), d) for i, d in enumerate(jax.devices())]
a = jax.make_array_from_single_device_arrays((3,), sharding, rows)
report = jaxhet.check_replicas(a, on_difference="sync")
print([str(d) for d in report.differences])
print([s.data.tolist() for s in report.tree.addressable_shards])
try: jaxhet.unlike_islands()
except jaxhet.UsageError as e: print(e)
for f in (lambda x: jaxhet.check_replicas({"loss": x}), jaxhet.sync_replicas):
    try: jax.jit(f)(a)
    except jaxhet.UsageError as e: print(e)
a.delete()
try: jaxhet.check_replicas({"weights": a})
except jaxhet.UsageError as e: print(e)
"""
    (ended,) = run(script, {})
    assert "['the array (on process 0; largest difference 1)']" in ended.text, ended.text
    assert "[[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]" in ended.text
    assert "call jaxhet.initialize() first" in ended.text
    traced = "is a value inside a function that JAX traces (jit, grad, shard_map), where"
    assert f"['loss'] {traced}" in ended.text, ended.text
    assert f"the array {traced}" in ended.text
    assert "['weights'] has no data: it was donated to a function (donate_argnums)" in ended.text
