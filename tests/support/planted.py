"""Errors of `models.pretrain` in its restore or in its data.

A comparison of losses that does not see these errors would say nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models import data
from models.extras import loop
from models.sharding import path_name

Replace = Callable[[Any, str, Any], None]  # the signature of `setattr`


def moment(replace: Replace) -> None:
    """A restored run begins with zeros in the first moment of one parameter."""
    restored = loop.Run._restored

    def without(run: loop.Run, step: int) -> Any:
        state = restored(run, step)
        leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        names = [path_name(path) for path, _ in leaves]
        (place,) = (i for i, n in enumerate(names) if "/mu/" in n and n.endswith("query/kernel"))
        values = [leaf for _, leaf in leaves]
        values[place] = jnp.zeros_like(values[place])
        return jax.tree.unflatten(tree, values)

    replace(loop.Run, "_restored", without)


def row(replace: Replace) -> None:
    """Each step reads one row that is not its own, and leaves out one of its own."""
    begin = data.Batches._begin
    replace(data.Batches, "_begin", lambda batches, step, row: begin(batches, step, row + 1))
