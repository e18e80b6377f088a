"""Emergency checkpoints of Orbax: each island has a replica of the state on its own disk.

Usage: emergency_program.py save|restore FOLDER. Run by `test_emergency_checkpoints.py`.
"""

import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

import jaxhet

_STEPS = 7, 8  # the first is saved in persistent storage, too


def _state(mesh: jax.sharding.Mesh, step: int) -> dict[str, jax.Array]:
    """A state that is equal on all replicas, sharded inside each."""

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.Array:
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / step
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(shape, sharding, values.__getitem__)

    return {"weights": array((8, 3), "shard"), "bias": array((5,))}


def _manager(mesh: jax.sharding.Mesh, state: Any, folder: pathlib.Path) -> Any:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return emergency.CheckpointManager(
        local_directory=epath.Path(folder / f"local{jax.process_index()}"),
        persistent_directory=epath.Path(folder / "persistent"),
        global_mesh=mesh,
        abstract_state=abstract,
        options=emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1000),
            replica_axis_index=0,
        ),
    )


def _check_equal(found: jax.Array, wanted: jax.Array) -> None:
    for shard, other in zip(found.addressable_shards, wanted.addressable_shards, strict=True):
        assert (shard.index, shard.device) == (other.index, other.device)
        np.testing.assert_array_equal(shard.data, other.data)


def main() -> None:
    """Saves the state, or restores it and compares."""
    flags.FLAGS.mark_as_parsed()  # Orbax reads its own
    what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    jaxhet.initialize()
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    mesh = jaxhet.make_mesh({"replica": len(jaxhet.islands()), "shard": -1})
    states = {step: _state(mesh, step) for step in _STEPS}
    local = folder / f"local{jax.process_index()}"
    local.mkdir(exist_ok=True)
    manager = _manager(mesh, states[_STEPS[0]], folder)
    if what == "save":
        for step, state in states.items():
            composite = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
            assert manager.save(step, args=composite)
            manager.wait_until_finished()
    else:
        step = manager.latest_step()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states[step])
        arguments = ocp.args.PyTreeRestore(
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
        )
        restored = manager.restore(step, args=ocp.args.Composite(state=arguments))["state"]
        jax.tree.map(_check_equal, restored, states[step])
        print("restored step", step, flush=True)
    manager.close()
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
