"""Hook of `jax.device_put`; uses JAX's internals, as `_jax/compat.py` does.

tests/multiprocess/test_jax_api.py tests it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxhet._jax.compat import Device
from jaxhet._jax.replacements import install


def divert(
    crosses: Callable[[Sharding, Sharding], bool],
    put: Callable[[jax.Array, Sharding], Mapping[Device, jax.Array]],
) -> None:
    """Replaces `jax.device_put` for some pairs of shardings.

    Uncommitted arrays keep JAX's function: each process has a copy of them.

    Args:
      crosses: Gets the shardings of an array and of the result; returns whether `put` moves it.
      put: Gets an array and the sharding of the result; returns the result's shards on devices of
        this process, which have memory of their own. No mesh is set meanwhile.
    """
    from jax._src import array, mesh, sharding_impls
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.random import prng

    donated = xla_client.ArrayCopySemantics.DONATE_INPUT

    def put_elsewhere(x: array.ArrayImpl, aval: Any, target: Sharding, copy: Any) -> jax.Array:
        with (
            jax.disable_jit(False),
            sharding_impls._internal_use_concrete_mesh(mesh.empty_concrete_mesh),
            mesh.use_abstract_mesh(mesh.empty_abstract_mesh),
        ):
            shards = put(x, target)
        if copy == donated:
            x.delete()
        devices = target._addressable_device_assignment
        return pxla.batched_device_put(aval, target, [shards[d] for d in devices], devices)

    @install("jax._src.dispatch:_device_put_sharding_impl")
    def diverted(put_by_jax: Any, x: Any, aval: Any, device: Any, copy: Any) -> Any:
        is_key = isinstance(x, prng.PRNGKeyArray)
        own = x._base_array if is_key else x
        if device is None or not isinstance(own, array.ArrayImpl) or not own._committed:
            return put_by_jax(x, aval, device, copy)
        if isinstance(device, Sharding):
            target = device
        elif own.is_fully_addressable or own.sharding.num_devices == 1:
            target = SingleDeviceSharding(device)
        else:  # JAX refuses it
            return put_by_jax(x, aval, device, copy)
        if not crosses(own.sharding, target):
            return put_by_jax(x, aval, device, copy)
        own._check_if_deleted()
        if not is_key:
            return put_elsewhere(own, aval, target, copy)
        target = sharding_impls.physical_sharding(aval, target)
        own_aval = own.aval.update(sharding=None)
        return prng.PRNGKeyArray(x._impl, put_elsewhere(own, own_aval, target, copy))
