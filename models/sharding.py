"""Which axis of which array lies on which mesh axis: two tables, for parameters and activations.

`data` splits the batch and is the outer axis, the one that crosses islands; `model` splits heads,
hidden units and vocabulary inside an island (arXiv:1909.08053). Every parameter is whole on each
`data` position, so all-reduce is the only collective that crosses `data`.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec

# By path in the model. The first axis of everything under `blocks` is the layer.
PARAMETERS: dict[str, PartitionSpec] = {
    "embed/embedding": P("model", None),
    "blocks/attention_norm/scale": P(None, None),
    "blocks/attention/query/kernel": P(None, None, "model", None),
    "blocks/attention/key/kernel": P(None, None, "model", None),
    "blocks/attention/value/kernel": P(None, None, "model", None),
    "blocks/attention/out/kernel": P(None, "model", None, None),
    "blocks/mlp_norm/scale": P(None, None),
    "blocks/mlp/gate/kernel": P(None, None, "model"),
    "blocks/mlp/up/kernel": P(None, None, "model"),
    "blocks/mlp/down/kernel": P(None, "model", None),
    "final_norm/scale": P(None),
    "head/kernel": P(None, "model"),
}

# By the name that a layer gives to `constrain`.
ACTIVATIONS: dict[str, PartitionSpec] = {
    "tokens": P("data", None),
    "residual": P("data", None, None),
    "heads": P("data", None, "model", None),
    "hidden": P("data", None, "model"),
    "logits": P("data", None, "model"),
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


def activation_sharding(name: str, mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of a row of `ACTIVATIONS` on `mesh`."""
    return NamedSharding(mesh, _on_mesh(ACTIVATIONS[name], mesh.shape))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """One whole copy on every device."""
    return NamedSharding(mesh, P())


def constrain(x: jax.Array, name: str) -> jax.Array:
    """Pins x to its row of `ACTIVATIONS` on the mesh of `jax.set_mesh`; without one, x itself.

    Without these pins the compiler may move a batch over `data` by all-gather or all-to-all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _on_mesh(ACTIVATIONS[name], mesh.shape))


def _on_mesh(spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """`spec` without the axes that the mesh does not have."""
    return P(*(axis if axis in sizes else None for axis in spec))


def _check_even(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]
) -> None:
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % sizes[axis]:
            raise ValueError(
                f"parameter {name} of shape {shape} can't be split over {axis}={sizes[axis]}: "
                f"{size} is not a multiple; choose a mesh with a smaller {axis} axis."
            )
