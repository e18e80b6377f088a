"""`jax.device_put` between islands: pairs of shardings, and which value arrives where."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (dtype names)
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DTYPES = ("float32", "bfloat16", "int8", "bool", "int4", "float8_e4m3fn", "complex64", "uint16")


def bits(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """An array of random bits, NaNs included."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if dtype in ("bool", "int4"):
        return rng.integers(0, 2 if dtype == "bool" else 8, shape).astype(kind)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def put(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array of which each process passes its own shards only."""
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def shards(array: jax.Array) -> list[Any]:
    """Where the shards of this process lie, and what they hold."""
    return [(str(s.index), np.asarray(s.data)) for s in array.addressable_shards]


def check(moved: jax.Array, value: np.ndarray, sharding: Sharding) -> int:
    """Compares the shards of this process; returns how many there are."""
    assert moved.sharding == sharding
    assert (moved.shape, moved.dtype, moved.committed) == (value.shape, value.dtype, True)
    own = [d for d in sharding.device_set if d.process_index == jax.process_index()]
    assert {shard.device for shard in moved.addressable_shards} == {*own}
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), shard
    return len(own)


def shardings(devices: Sequence[Any], ndim: int) -> Iterator[Sharding]:
    """Ways to lay an array of so many dimensions out on some devices."""
    flat = Mesh(np.array(devices), ("x",))
    yield NamedSharding(flat, P())
    if ndim:
        yield NamedSharding(flat, P(*[None] * (ndim - 1), "x"))
        yield NamedSharding(flat, P("x"))
    if len(devices) % 2 == 0:
        grid = Mesh(np.array(devices).reshape(2, -1), ("x", "y"))
        if ndim:
            yield NamedSharding(grid, P("y"))
            yield NamedSharding(grid, P(("y", "x")))
        if ndim > 1:
            yield NamedSharding(grid, P("y", "x"))
    if len(devices) == 1:
        yield SingleDeviceSharding(devices[0])


def sides() -> list[tuple[list[Any], list[Any]]]:
    """Devices that an array is on, and devices that it is put on."""
    a, b = ([*island.devices] for island in jaxhet.islands())
    return [
        (a, b),
        (b, a),
        (a[:1], b),
        (b, a[-1:]),
        (a[:1], b[-1:]),
        (a + b, b),
        (a, b + a),
        (a[1:] + b[:1], b[1:] + a[:1]),
        (b[:2], a[:2] + b[2:]),
    ]


def cases() -> Iterator[tuple[np.ndarray, Sharding, Sharding]]:
    """Array, where it is, where it is put: layouts and types in turn, not all pairs of them."""
    number = 0
    for one, other in sides():
        for shape in ((24, 12), (24, 12), (7,), (24,), (0, 24) if number % 2 else ()):
            number += 1
            sources = [s for s in shardings(one, len(shape)) if _divides(s, shape)]
            targets = [s for s in shardings(other, len(shape)) if _divides(s, shape)]
            value = bits(DTYPES[number % len(DTYPES)], shape, number)
            yield value, sources[number % len(sources)], targets[number // 2 % len(targets)]


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def move_all(first: int) -> int:
    """Moves every fourth array from the first; returns how many shards it has compared here."""
    compared = 0
    for value, source, target in [*cases()][first::4]:
        x = put(value, source)
        compared += check(jax.device_put(x, target), value, target)
        check(x, value, source)
    return compared


def _sides_of_one_island() -> tuple[Sharding, Sharding]:
    one, other = (NamedSharding(Mesh(i.devices, ("x",)), P("x")) for i in jaxhet.islands())
    return one, other


def as_jax_does() -> list[Any]:
    """Contexts and arguments of `jax.device_put`, keys, and a round without waiting."""
    one, other = _sides_of_one_island()
    everywhere = NamedSharding(Mesh(jax.devices(), ("x",)), P())
    value = np.arange(8, dtype=np.float32)
    x = put(value, one)
    with jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("z",))), jax.disable_jit():
        check(jax.device_put(x, other), value, other)
    y, back = jax.vjp(lambda x: jax.device_put(x, other, src=one), x)
    check(back(y)[0], value, one)
    for _ in range(4):
        x = jax.device_put(jax.device_put(x, other), one)
    check(x, value, one)
    donated, copied, kept = put(value, everywhere), put(value, everywhere), put(value, everywhere)
    check(jax.device_put(donated, other, donate=True), value, other)
    check(jax.device_put(kept, other), value, other)
    result = jax.device_put(copied, other, may_alias=False)
    copied.delete()
    check(result, value, other)
    first, *_, last = jax.devices()
    tree = [put(value, SingleDeviceSharding(first)), put(-value, SingleDeviceSharding(first)), None]
    for sign, moved in zip((1, -1), jax.device_put(tree, last), strict=False):
        check(moved, sign * value, SingleDeviceSharding(last))
    check(jax.device_put(x, SingleDeviceSharding(last)), value, SingleDeviceSharding(last))
    keys = jax.jit(lambda: jax.random.split(jax.random.key(5), 8), out_shardings=everywhere)()
    keys = jax.device_put(keys, other)
    data = [(s.index, jax.random.key_data(s.data)) for s in keys.addressable_shards]
    return [donated.is_deleted(), kept.is_deleted(), keys.dtype.name, data]


def refusal_of_host_memory() -> str:
    """Words of the error."""
    one, other = _sides_of_one_island()
    try:
        jax.device_put(put(np.zeros(8), one), other.with_memory_kind("pinned_host"))
    except jaxhet.UsageError as error:
        return str(error)
    return ""


def refusal_of_a_device() -> list[Any]:
    """JAX's error for a move to one device, where each process names another device."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    array = put(np.arange(12.0), sharding)
    other = (jax.process_index() + 1) % jax.process_count()
    try:
        jax.device_put(array, jax.local_devices(process_index=other)[0])
    except ValueError as error:
        return [str(error), float(array.sum())]
    return []
