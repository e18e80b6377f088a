"""Which axis of which array lies on which mesh axis: two tables, for parameters and activations.

| mesh axis | what it splits | what crosses it |
|---|---|---|
| `data` | the batch | all-reduce of gradients |
| `fsdp` | the batch, parameters and moments (arXiv:1910.02054) | all-gather, reduce-scatter |
| `expert` | the batch, and the experts of `models.extras.moe` | all-to-all of tokens |
| `stage` | the layers, as `models.extras.pipeline` divides them | permute from stage to stage |
| `sequence` | the positions of activations | permute of keys and values, gradients' all-reduce |
| `model` | heads, hidden units, vocabulary (arXiv:1909.08053) | all-reduce of activations |

A mesh has any of them; its first axes cross islands.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec

# The axis that splits the positions of a row.
SEQUENCE = "sequence"

AXES = ("data", "fsdp", "expert", "stage", SEQUENCE, "model")

# The axes that split a batch.
BATCH = ("data", "fsdp", "expert")

# By path in the model. The first axis of everything under `blocks` is the layer. A table that rows
# are looked up in would not be gathered but moved with its rows: it stays whole over `fsdp`.
PARAMETERS: dict[str, PartitionSpec] = {
    "embed/embedding": P("model", None),
    "blocks/attention_norm/scale": P("stage", None),
    "blocks/attention/query/kernel": P("stage", "fsdp", "model", None),
    "blocks/attention/query/bias": P("stage", "model", None),
    "blocks/attention/key/kernel": P("stage", "fsdp", "model", None),
    "blocks/attention/key/bias": P("stage", "model", None),
    "blocks/attention/value/kernel": P("stage", "fsdp", "model", None),
    "blocks/attention/value/bias": P("stage", "model", None),
    "blocks/attention/out/kernel": P("stage", "model", None, "fsdp"),
    "blocks/attention/query_norm/scale": P("stage", None),
    "blocks/attention/key_norm/scale": P("stage", None),
    "blocks/mlp_norm/scale": P("stage", None),
    "blocks/mlp/gate/kernel": P("stage", "fsdp", "model"),
    "blocks/mlp/up/kernel": P("stage", "fsdp", "model"),
    "blocks/mlp/down/kernel": P("stage", "model", "fsdp"),
    "blocks/moe/router/kernel": P("stage", None, None),
    "blocks/moe/gate": P("stage", "expert", "fsdp", "model"),
    "blocks/moe/up": P("stage", "expert", "fsdp", "model"),
    "blocks/moe/down": P("stage", "expert", "model", "fsdp"),
    "final_norm/scale": P(None),
    "head/kernel": P("fsdp", "model"),
}

# By the name that a layer gives to `constrain`. A row of tokens has one position more than a row of
# activations, which is not split; `positions` is for the inputs and the labels in it.
ACTIVATIONS: dict[str, PartitionSpec] = {
    "tokens": P(BATCH, None),
    "parts": P(None, BATCH, None),
    "shares": P("data", None, BATCH[1:], None),
    "positions": P(BATCH, SEQUENCE),
    "residual": P(BATCH, SEQUENCE, None),
    "microbatches": P(None, BATCH, None, None),
    "heads": P(BATCH, SEQUENCE, "model", None),
    "past": P(None, BATCH, None, "model", None),
    "hidden": P(BATCH, SEQUENCE, "model"),
    "logits": P(BATCH, SEQUENCE, "model"),
    "last": P(BATCH, None),
    "chosen": P(None),
}


def path_name(path: tuple[Any, ...]) -> str:
    """The name of a parameter from its path in the tree: keys joined with slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_shardings(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """A `NamedSharding` for each leaf of `params` (arrays or shapes), from `PARAMETERS`.

    Raises ValueError for a parameter that the table lacks or that the mesh can't split evenly.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        if name not in PARAMETERS:
            raise ValueError(f"parameter {name} has no row in models.sharding.PARAMETERS.")
        spec = _on_mesh(PARAMETERS[name], mesh.shape)
        _check_even(name, leaf.shape, spec, mesh.shape)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)


def split_further(params: Any, shardings: Any, axes: Collection[str]) -> Any:
    """Shardings that split each array over further axes.

    Each axis divides the first dimension that it divides evenly.

    Args:
      params: Parameters, arrays or their shapes.
      shardings: Shardings of the parameters.
      axes: Mesh axes to split over as well.

    Raises:
      ValueError: A parameter has no dimension that an axis divides evenly.
    """

    def sharding(path: tuple[Any, ...], leaf: Any, old: NamedSharding) -> NamedSharding:
        sizes = old.mesh.shape
        entries = [_names(e) for e in old.spec] + [()] * (leaf.ndim - len(old.spec))
        used = {name for entry in entries for name in entry}
        for axis in axes:
            if axis in used or sizes[axis] == 1:
                continue
            parts = [math.prod(sizes[name] for name in (*entry, axis)) for entry in entries]
            even = [d for d, n in enumerate(parts) if leaf.shape[d] % n == 0]
            if not even:
                raise ValueError(
                    f"the update of parameter {path_name(path)} of shape {leaf.shape} can't be "
                    f"split over {axis}={sizes[axis]}: choose a mesh whose {axis} axis divides one "
                    "of its dimensions, or --update replicated."
                )
            entries[even[0]] = (*entries[even[0]], axis)
        spec = (names if len(names) > 1 else next(iter(names), None) for names in entries)
        return NamedSharding(old.mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(sharding, params, shardings)


def activation_sharding(name: str, mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of a row of `ACTIVATIONS` on `mesh`."""
    return NamedSharding(mesh, _on_mesh(ACTIVATIONS[name], mesh.shape))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """One whole copy on every device."""
    return NamedSharding(mesh, P())


def constrain(x: jax.Array, name: str) -> jax.Array:
    """Pins x to its row of `ACTIVATIONS` on the mesh of `jax.set_mesh`; without one, x itself.

    Without these pins the compiler may move a batch over `data` by all-gather or all-to-all. In a
    `shard_map` the axes that it has split already drop out.
    """
    axes = free_axes()
    if not axes:
        return x
    return jax.lax.with_sharding_constraint(x, _on_mesh(ACTIVATIONS[name], axes))


def gather_after(params: Any, x: jax.Array) -> Any:
    """Makes gathers of `params` over `fsdp` wait for x.

    Without this a step would begin by gathering the parameters of all layers, and keep them. On a
    mesh without `fsdp`, and in a `shard_map` over it, returns `params` unchanged.
    """
    return _after(params, x) if "fsdp" in free_axes() else params


@jax.custom_vjp
def _after(params: Any, x: jax.Array) -> Any:
    return jax.lax.optimization_barrier((params, x))[0]


# The barrier's own derivative would make the backward pass wait for sums of gradients.
_after.defvjp(
    lambda params, x: (_after(params, x), jnp.zeros_like(x)),
    lambda zeros, gradients: (gradients, zeros),
)


def free_axes() -> dict[str, int]:
    """The axes of the mesh of `jax.set_mesh` that no `shard_map` has split yet, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: n for name, n in mesh.shape.items() if name not in mesh.manual_axes}


def batch_axes(axes: Collection[str]) -> tuple[str, ...]:
    """Axes among `axes` that split a batch, in the order of the split."""
    return tuple(name for name in BATCH if name in axes)


def token_axes(axes: Collection[str]) -> tuple[str, ...]:
    """Axes among `axes` that split tokens: the rows of a batch or the positions of a row."""
    return tuple(name for name in (*BATCH, SEQUENCE) if name in axes)


def token_spec(axes: Collection[str]) -> PartitionSpec:
    """Sharding of the first two axes of [B, T, …] over `axes`."""
    return _on_mesh(ACTIVATIONS["positions"], axes)


def check_positions(positions: int, sizes: Mapping[str, int]) -> None:
    """Checks that a mesh of these sizes divides `positions` positions evenly.

    Raises:
      ValueError: The axis `sequence` does not divide the positions.
    """
    size = sizes.get(SEQUENCE, 1)
    if positions % size:
        raise ValueError(
            f"rows of {positions} positions (--seq) can't be split over {SEQUENCE}={size}: choose "
            f"a multiple of {size}."
        )


def _on_mesh(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """`spec` without the mesh axes that are not among `axes`."""
    kept = (tuple(name for name in _names(entry) if name in axes) for entry in spec)
    return P(*(names if len(names) > 1 else next(iter(names), None) for names in kept))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one array axis."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _check_even(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]
) -> None:
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % sizes[axis]:
            raise ValueError(
                f"parameter {name} of shape {shape} can't be split over {axis}={sizes[axis]}: "
                f"{size} is not a multiple; choose a mesh with a smaller {axis} axis."
            )
