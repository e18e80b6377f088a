"""Random JAX programs, drawn before anything is traced: vendors trace different functions."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet.compiler import Options
from tests.python.compiler.drawn_functions import (
    FUNCTIONS,
    SIZE,
    SMOOTH,
    TWO_WAYS,
    Array,
    Function,
)

NUM_DEVICES = 4
_SHAPE = (SIZE, SIZE)
_ISLAND_SIZES = (1, 2, 2)  # devices of an island, by seed
_BUCKET_BYTES = (Options().bucket_bytes, 2048, 0)

# --- pieces of a program, with exchanges ---


class Draw:
    """Draws a program's pieces.

    Attributes:
      rng: The source of all choices.
      axes: Axes of the mesh, or tuples of them, that a collective can go over.
      has_gradient: Whether only functions that have a gradient are wanted.
      depth: In how many pieces the next one is.
    """

    def __init__(self, seed: int, axes: Sequence[Any]):
        self.rng = np.random.default_rng(seed)
        self.axes = axes
        self.has_gradient = False
        self.depth = 0
        self._numbers = itertools.count(1)

    def one_of[T](self, items: Sequence[T]) -> T:
        return items[int(self.rng.integers(len(items)))]

    def flip(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def function(self) -> Function:
        """A function without exchanges."""
        names = SMOOTH if self.has_gradient else tuple(FUNCTIONS)
        return FUNCTIONS[self.one_of(names)]

    def named(self, function: Function) -> Function:
        """The function under a name of its own; of its own input, so that nothing is shared."""
        number = next(self._numbers)

        def run(x: Array) -> Array:
            with jax.named_scope(f"name_{number}"):
                return function(x * (1 + number / 64))

        return run


def _per_vendor(draw: Draw, by_row: bool = False) -> Function:
    """A function that each vendor has its own code for."""
    one, other = draw.one_of(TWO_WAYS[:-1] if by_row else TWO_WAYS)
    if draw.flip():
        return jaxhet.per_platform(cuda=one, rocm=other)
    return lambda x: lax.platform_dependent(x, cuda=one, rocm=other)


def _plain(draw: Draw) -> Function:
    """A named value."""
    match draw.rng.integers(8):
        case 0 | 1:
            return draw.named(_per_vendor(draw))
        case 2 | 3:
            first, second = draw.function(), draw.function()
            return draw.named(lambda x: first(second(x)))
        case _:
            return draw.named(draw.function())


_KINDS = (
    "psum",
    "psum",
    "psum",
    "pmax",
    "pmin",
    "unequal_psum",
    "unequal_pmax",
    "ppermute",
    "gather",
    "scatter",
    "all_to_all",
)


def _unequal_groups(axis: Any) -> list[list[int]] | None:
    """Groups of unequal size, or None where JAX has no groups or an axis is too short for them."""
    size = lax.axis_size(axis)
    if isinstance(axis, tuple) or size < 3:
        return None
    return [list(range(size - 1)), [size - 1]]


def _collective(kind: str, axis: Any, x: Array) -> Array:
    """Every collective of a kind is written on one line."""
    size = lax.axis_size(axis)
    match kind:
        case "psum":
            return lax.psum(x, axis)
        case "pmax":
            return lax.stop_gradient(lax.pmax(lax.stop_gradient(x), axis))
        case "pmin":
            return lax.stop_gradient(lax.pmin(lax.stop_gradient(x), axis))
        case "unequal_psum":
            return lax.psum(x, axis, axis_index_groups=_unequal_groups(axis))
        case "unequal_pmax":
            largest = lax.pmax(lax.stop_gradient(x), axis, axis_index_groups=_unequal_groups(axis))
            return lax.stop_gradient(largest)
        case "ppermute":
            return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])
        case "gather":
            return lax.all_gather(x, axis).sum(0)
        case "scatter":
            return jnp.tile(lax.psum_scatter(x, axis, tiled=True), (size, 1))
        case _:
            return lax.all_to_all(x, axis, 0, 0, tiled=True)


def _moved(draw: Draw, kind: str, axis: Any, value: Function) -> Function:
    """A value that is moved. The value that its gradient moves back has a name as well."""
    scaled = draw.named(lambda y: y * 0.75) if draw.has_gradient or draw.flip(0.3) else None

    def run(x: Array) -> Array:
        y = _collective(kind, axis, value(x))
        return y if scaled is None else scaled(y)

    return run


def _one(draw: Draw) -> Function:
    return _moved(draw, draw.one_of(_KINDS), draw.one_of(draw.axes), _plain(draw))


def _several(draw: Draw) -> Function:
    """Exchanges that differ only in the computation before them."""
    kind, axis = draw.one_of(_KINDS), draw.one_of(draw.axes)
    count = int(draw.rng.integers(2, 6))
    shared = draw.function() if draw.flip(0.3) else None
    values = [draw.named(shared) if shared else _plain(draw) for _ in range(count)]
    moved = [_moved(draw, kind, axis, value) for value in values]
    return lambda x: functools.reduce(jnp.add, (m(x) * (i + 1.5) for i, m in enumerate(moved)))


def _tree(draw: Draw) -> Function:
    """A sum of arrays of several shapes and types at once."""
    axis = draw.one_of(draw.axes)
    values = [_plain(draw) for _ in range(int(draw.rng.integers(2, 5)))]
    scaled = [draw.named(lambda y: y * 0.75) for _ in values]
    dtypes = [draw.one_of(("float32", "float32", "bfloat16", "float16")) for _ in values]
    sizes = [draw.one_of((SIZE, SIZE, 5, 1)) for _ in values]
    is_symmetric = draw.flip()

    def run(x: Array) -> Array:
        parts = [value(x) for value in values]
        leaves = {
            str(i): part.astype(dtype)[:size]
            for i, (part, dtype, size) in enumerate(zip(parts, dtypes, sizes, strict=True))
        }
        sums = lax.psum(leaves, axis)
        padded = [
            scale(jnp.resize(sums[str(i)].astype(x.dtype), _SHAPE))
            * (1 if is_symmetric else i + 1.0)
            for i, scale in enumerate(scaled)
        ]
        return functools.reduce(jnp.add, padded)

    return run


def _large(draw: Draw) -> Function:
    """Exchanges of arrays that are above every bucket's limit."""
    kind, axis = draw.one_of(("psum", "ppermute", "gather")), draw.one_of(draw.axes)
    functions = [draw.one_of((jnp.sin, jnp.tanh, jnp.exp, jnp.square)) for _ in range(3)]
    moved = [_moved(draw, kind, axis, draw.named(f)) for f in functions]

    def run(x: Array) -> Array:
        x = jnp.tile(x, (40, 32))
        return functools.reduce(jnp.add, (m(x) for m in moved))[:SIZE, :SIZE]

    return run


def _in_loop(draw: Draw) -> Function:
    piece, length = _piece(draw), int(draw.rng.integers(2, 5))
    return lambda x: lax.fori_loop(0, length, lambda i, y: y * 0.5 + piece(y), x)


def _in_scan(draw: Draw) -> Function:
    """A scan whose exchanges wait for each other, or don't."""
    piece, unroll = _piece(draw), draw.one_of((1, 1, 2, True))
    is_carried, length = draw.flip(0.7), draw.one_of((3, 4))

    def run(x: Array) -> Array:
        def body(carry: Array, row: Array) -> tuple[Array, Array]:
            moved = piece(carry * row if is_carried else x * row)
            return (moved if is_carried else carry + moved), moved[0]

        rows = jnp.cos(x[:length])
        carry, moved = lax.scan(body, x, rows, unroll=unroll)
        return carry + moved.sum(0)

    return run


def _in_branches(draw: Draw) -> Function:
    one, other = _piece(draw), draw.one_of((_plain, _one, _several))(draw)
    return lambda x: lax.cond(x[0, 0] > 0.5, one, other, x)


def _repeated(draw: Draw) -> Function:
    """Several calls of one function that JAX traces and lowers once."""
    make, is_chained = draw.one_of((_piece, _piece, _in_loop, _in_branches)), draw.flip()
    piece = jax.jit(make(draw))
    return lambda x: piece(piece(x) * 0.5 if is_chained else x * 0.5) + 2 * piece(x)


def _gradient(draw: Draw) -> Function:
    """Sum of the gradients of a small loss with respect to each layer's factor."""
    outer, draw.has_gradient = draw.has_gradient, True
    layers = [draw.function() for _ in range(int(draw.rng.integers(2, 5)))]
    layers = [jax.checkpoint(layer) if draw.flip(0.3) else layer for layer in layers]
    piece = _piece(draw) if draw.flip(0.4) else None
    scales = [draw.named(lambda g: g * 0.5) for _ in layers]
    axis, draw.has_gradient = draw.one_of(draw.axes), outer

    def loss(weights: list[Array], x: Array) -> Array:
        for layer, weight in zip(layers, weights, strict=True):
            x = layer(x @ weight)
        return jnp.sum((x if piece is None else piece(x)) ** 2)

    def run(x: Array) -> Array:
        gradients = jax.grad(loss)([jnp.sin(x * (i + 1)) for i in range(len(layers))], x)
        gradients = [scale(g) for scale, g in zip(scales, gradients, strict=True)]
        return functools.reduce(jnp.add, lax.psum(gradients, axis))

    return run


def _checkpointed(draw: Draw) -> Function:
    """A gradient that computes the forward pass again."""
    outer, draw.has_gradient = draw.has_gradient, True
    piece, named = jax.checkpoint(_piece(draw)), draw.named(jnp.sin)
    draw.has_gradient = outer
    return jax.grad(lambda x: jnp.sum(piece(named(x)) ** 2))


def _own_backward(draw: Draw) -> Function:
    """A function whose backward pass has exchanges of its own."""
    there, back = _piece(draw), _one(draw)
    piece = jax.custom_vjp(there)
    piece.defvjp(lambda x: (there(x), x), lambda x, dy: (back(x * dy),))
    return jax.grad(lambda x: jnp.sum(piece(x) ** 2)) if not draw.has_gradient else piece


_SIMPLE = (_one, _several, _several, _tree, _large)
_NESTING = (_in_loop, _in_scan, _in_branches, _repeated, _gradient, _checkpointed, _own_backward)


_NESTING_PROBABILITY = (0.5, 0.35, 0)  # by depth


def _piece(draw: Draw) -> Function:
    makers = _NESTING if draw.flip(_NESTING_PROBABILITY[draw.depth]) else _SIMPLE
    draw.depth += 1
    piece = draw.one_of(makers)(draw)
    draw.depth -= 1
    return piece


# --- programs ---


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
      lower: Gives what JAX lowers for four devices.
      island_size: Devices of an island.
      options: How collectives are decomposed.
      is_partitioned: Whether XLA's partitioner makes its collectives.
    """

    lower: Callable[[Sequence[Any]], Any]
    island_size: int
    options: Options
    is_partitioned: bool


def program(seed: int) -> Program:
    """A program that depends on the seed alone."""
    is_partitioned = seed % 4 == 3
    axes = {"x": 2, "y": 2} if seed % 5 in (1, 3) else {"data": NUM_DEVICES}
    draw = Draw(seed, (*axes, tuple(axes)) if len(axes) > 1 else tuple(axes))
    options = Options(
        bucket_bytes=_BUCKET_BYTES[seed // 2 % len(_BUCKET_BYTES)],
        algorithm="flat" if draw.flip(0.2) else "auto",
        one_world_kernels=seed % 7 == 3,
        pipeline_iterations=2,
    )
    make = _partitioned if is_partitioned else _mapped
    lower = make(draw, axes)
    return Program(lower, _ISLAND_SIZES[seed % len(_ISLAND_SIZES)], options, is_partitioned)


def _mesh(devices: Sequence[Any], axes: dict[str, int]) -> Mesh:
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _mapped(draw: Draw, axes: dict[str, int]) -> Callable[[Sequence[Any]], Any]:
    """A program that says itself what crosses devices."""
    pieces = [_piece(draw) for _ in range(int(draw.rng.integers(1, 4)))]
    is_chained, is_split, gives_all = draw.flip(), draw.flip(0.3), draw.flip()

    def run(x: Array) -> list[Array]:
        results = []
        for piece in pieces:
            results.append(piece(x))
            if is_chained:
                x = results[-1]
        return results if gives_all else [functools.reduce(jnp.add, results)]

    spec = P(tuple(axes)) if is_split else P()
    x = jax.ShapeDtypeStruct((SIZE * (NUM_DEVICES if is_split else 1), SIZE), "float32")

    def lower(devices: Sequence[Any]) -> Any:
        mesh = _mesh(devices, axes)
        specs = {"in_specs": spec, "out_specs": spec, "check_vma": False}
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs)).lower(x)

    return lower


_Weights = dict[str, Array]
_Layer = Callable[[Array, _Weights], Array]
_ACTIVATIONS: tuple[Function, ...] = (
    jnp.tanh,
    jax.nn.gelu,
    jax.nn.softmax,
    lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6),
    lambda h: (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-6),
    lambda h: jax.nn.softmax(h @ h.T) @ h,
    lambda h: jnp.cumsum(h, 1),
    jnp.sort,
    lambda h: h + h[jnp.arange(h.shape[0])[::-1]],
)


def _pinned(draw: Draw, function: Function) -> Function:
    """A function of batches inside of which XLA's partitioner moves nothing.

    It would else move what suits one vendor's code, and another array for the other vendor's.
    """
    spec = P(draw.axes[0])

    def run(h: Array) -> Array:
        return lax.with_sharding_constraint(function(lax.with_sharding_constraint(h, spec)), spec)

    return run


def _layer(draw: Draw) -> _Layer:
    """A layer of a model, whose gradients XLA's partitioner sums."""
    activation, has_bias = draw.one_of(_ACTIVATIONS), draw.flip()
    if draw.flip(0.25):
        activation = _pinned(draw, _per_vendor(draw, by_row=True))
    constraint = draw.one_of((None, None, P(draw.one_of(draw.axes)), P()))
    is_residual = draw.flip(0.3)

    def run(h: Array, weights: _Weights) -> Array:
        y = h @ weights["w"] + (weights["b"] if has_bias else 0)
        if constraint is not None:
            y = lax.with_sharding_constraint(y, constraint)
        return activation(y) + (h if is_residual else 0)

    return jax.checkpoint(run) if draw.flip(0.25) else run


def _partitioned(draw: Draw, axes: dict[str, int]) -> Callable[[Sequence[Any]], Any]:
    """A train step; what crosses devices follows from shardings."""
    count, width = int(draw.rng.integers(2, 5)), draw.one_of((16, 16, 32, 288))
    is_scanned, unroll = draw.flip(0.35), draw.one_of((1, 1, 2))
    layers = [_layer(draw)] * count if is_scanned else [_layer(draw) for _ in range(count)]
    weight_spec = draw.one_of((P(), P(draw.axes[0]), P(None, draw.axes[-1]), P(*axes)))
    batch_spec = draw.one_of((P(tuple(axes)), P(draw.axes[0])))
    keeps_shardings, dtype = draw.flip(), draw.one_of(("float32", "float32", "bfloat16"))

    def loss(weights: Any, x: Array) -> Array:
        if is_scanned:
            x, _ = lax.scan(lambda h, own: (layers[0](h, own), None), x, weights, unroll=unroll)
        else:
            for layer, own in zip(layers, weights, strict=True):
                x = layer(x, own)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: Any, x: Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g * 0.5, weights, gradients), value

    def lower(devices: Sequence[Any]) -> Any:
        mesh = _mesh(devices, axes)

        def shape(dims: Sequence[int], spec: Any) -> Any:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

        dims, spec = ((count,), P(None, *weight_spec)) if is_scanned else ((), weight_spec)
        own = {"w": shape((*dims, width, width), spec), "b": shape((*dims, width), P())}
        weights = own if is_scanned else [own] * count
        out = jax.tree.map(lambda w: w.sharding, weights) if keeps_shardings else None
        with jax.set_mesh(mesh):
            jitted = jax.jit(step, out_shardings=(out, None))
            return jitted.lower(weights, shape((2 * width, width), batch_spec))

    return lower
