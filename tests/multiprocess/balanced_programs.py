"""A process of a job whose islands have unequal shares of a batch: gradients, compilations, bits.

Island 0 has four devices and island 1 two. What is right comes from one device of this process.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

TOTAL, ROWS, POSITIONS, WIDTH = 6, 4, 5, 12  # microbatches, and the shape of each
TOLERANCE = 1e-6  # relative to the largest gradient of a parameter, in float32
Loss = Callable[[Any, Any], tuple[Any, Any]]


def make_batch() -> dict[str, np.ndarray]:
    """All microbatches of a step. Some rows are all padding; others are padded at random."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, POSITIONS + 1, (TOTAL, ROWS, 1)) * (np.arange(ROWS) != 1)[:, None]
    shape = (TOTAL, ROWS, POSITIONS)
    return {
        "x": random.normal(size=(*shape, WIDTH)).astype(np.float32),
        "y": random.normal(size=shape).astype(np.float32),
        "mask": (np.arange(POSITIONS) < lengths).astype(np.float32),
    }


def share(batch: Any, counts: Sequence[int], mesh: Mesh, rows: str | None) -> Any:
    """Shards a batch so that each position of `data` holds only its own microbatches."""
    ends = np.cumsum(counts)
    sharding = NamedSharding(mesh, P("data", None, rows))

    def of_leaf(x: np.ndarray) -> jax.Array:
        shares = np.full((len(counts), TOTAL, *x.shape[1:]), np.nan, x.dtype)
        shares[:, 0] = 0  # a position without microbatches computes this one
        for i, (count, end) in enumerate(zip(counts, ends, strict=True)):
            shares[i, :count] = x[end - count : end]
        return jax.make_array_from_callback(shares.shape, sharding, lambda index: shares[index])

    return jax.tree.map(of_leaf, batch)


def errors(predicted: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of tokens, and the number of tokens."""
    return jnp.sum((predicted - batch["y"]) ** 2 * batch["mask"]), jnp.sum(batch["mask"])


def plain_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight), None

    # A carry that begins as zeros: `loss` may be any function, whatever axes its values vary over.
    x, _ = jax.lax.scan(layer, jnp.zeros_like(batch["x"]) + batch["x"], params["layers"])
    return errors(x @ params["head"], batch)


def plain_params() -> Any:
    random = np.random.default_rng(1)
    return {
        "layers": random.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 3,
        "head": random.normal(size=(WIDTH,)).astype(np.float32),
    }


class Model(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=nnx.Rngs(3))
        self.down = nnx.Linear(2 * WIDTH, 1, rngs=nnx.Rngs(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))[..., 0]


def flax_model() -> tuple[Loss, Any]:
    """The loss of a model of Flax NNX, and its parameters, which are equal on all islands."""
    graph, shapes = nnx.split(nnx.eval_shape(Model))
    random = np.random.default_rng(2)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return errors(nnx.merge(graph, params)(batch["x"]), batch)

    return loss, jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)


def on_mesh(tree: Any, mesh: Mesh, axis: str | None) -> Any:
    """Parameters split over a mesh axis along the dimensions of the model's width."""

    def of_leaf(x: Any) -> jax.Array:
        values = np.asarray(x)
        spec = P(*(axis if n in (WIDTH, 2 * WIDTH) and i == values.ndim - 1 else None
                   for i, n in enumerate(values.shape)))  # fmt: skip
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(of_leaf, tree)


def right(loss: Loss, params: Any, batch: Any) -> tuple[Any, Any]:
    """Mean loss and gradients of the whole batch, on one device."""

    def mean(params: Any) -> jax.Array:
        value, weight = loss(params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch))
        return value / weight

    device = jax.local_devices()[0]
    found = jax.jit(jax.value_and_grad(mean))(jax.device_put(params, device))
    return jax.tree.map(np.asarray, found)


def gathered(tree: Any, mesh: Mesh) -> Any:
    copy = jaxhet.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), copy(tree))


def check_gradients(
    loss: Loss,
    params: Any,
    sizes: dict[str, int],
    splits: Sequence[Sequence[int]],
    forms: dict[str, Any] | None = None,
) -> None:
    """Compares with one device. Islands may have unlike forms of the loss, or parts, in `forms`."""
    mesh = jaxhet.make_mesh(sizes)
    inner = next((name for name in sizes if name != "data"), None)
    batch = make_batch()
    value, gradients = right(loss, params, batch)
    placed = on_mesh(params, mesh, inner)
    how = {"loss": loss, "axis": "data", "mesh": mesh, **(forms or {})}
    balanced = jaxhet.jit(jaxhet.balanced_value_and_grad(**how))
    for counts in splits:
        assert sum(counts) == TOTAL
        shares = share(batch, counts, mesh, "fsdp" if inner == "fsdp" else None)
        found = balanced(placed, shares, np.array(counts, np.int32))
        for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(placed), strict=True):
            shapes = (x.sharding.shard_shape(x.shape) for x in (one, other))
            assert math.prod(next(shapes)) <= math.prod(next(shapes)), (sizes, one.sharding)
        found = gathered(found, mesh)
        assert abs(found[0] - value) <= TOLERANCE * abs(value), (sizes, counts, found[0], value)
        for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(gradients), strict=True):
            difference = np.max(np.abs(one - other)) / np.max(np.abs(other))
            assert difference <= TOLERANCE, (sizes, counts, difference)
    assert balanced._cache_size() == 1, "compiled anew for other counts"
    shares = share(batch, splits[0], mesh, "fsdp" if inner == "fsdp" else None)
    for counts in ([TOTAL + 1, *([0] * (mesh.shape["data"] - 1))], [0] * mesh.shape["data"]):
        found = balanced(placed, shares, np.array(counts, np.int32))
        assert np.isnan(gathered(found[0], mesh)), counts


def check_replicas() -> None:
    """Five steps whose update is sharded: replicas have equal bits, whatever the arithmetic."""
    assert any("multiply and add" in text for text in jaxhet.unlike_islands())
    mesh = jaxhet.make_mesh({"data": 3, "rest": 2})
    whole = NamedSharding(mesh, P())
    every = ("data", "rest")
    split = {"layers": NamedSharding(mesh, P(None, every)), "head": NamedSharding(mesh, P(every))}
    balanced = jaxhet.balanced_value_and_grad(plain_loss, axis="data")
    adam = optax.adam(1e-2)

    @jaxhet.jit
    def step(params: Any, state: Any, batch: Any, counts: Any) -> Any:
        _, gradients = balanced(params, batch, counts)
        parts = jax.lax.with_sharding_constraint((gradients, params), (split, split))
        updates, state = adam.update(parts[0], state, parts[1])
        updated: Any = optax.apply_updates(parts[1], updates)
        return jax.lax.with_sharding_constraint(updated, whole), state

    with jax.set_mesh(mesh):
        params = on_mesh(plain_params(), mesh, None)
        state = jaxhet.jit(adam.init)(params)
        for counts in ([4, 1, 1], [2, 2, 2], [1, 1, 4], [3, 2, 1], [1, 4, 1]):
            shares = share(make_batch(), counts, mesh, None)
            params, state = step(params, state, shares, np.array(counts, np.int32))
    assert jaxhet.check_replicas(params).num_compared == 2


def main() -> None:
    jaxhet.initialize()
    params = plain_params()
    check_gradients(plain_loss, params, {"data": 6}, ([1] * 6, [0, 0, 2, 1, 2, 1]))
    check_gradients(plain_loss, params, {"data": 3, "fsdp": 2}, ([2, 2, 2], [3, 1, 2], [4, 2, 0]))
    lean = {"": plain_loss, "island1": jax.checkpoint(plain_loss)}
    memory = {"loss": lean, "parts": {"island1": 2}}
    check_gradients(plain_loss, params, {"data": 3, "fsdp": 2}, ([1, 2, 3],), memory)
    check_gradients(*flax_model(), {"data": 3, "model": 2}, ([2, 2, 2], [1, 2, 3]))
    check_replicas()
    print("balanced: all right")
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
