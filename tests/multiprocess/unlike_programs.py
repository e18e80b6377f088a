"""Random programs whose exchanges look alike, and the worker that runs them on unlike islands.

`make` is a pure function of a seed. All exchanges of a program have one shape and stand on one
line, each takes another value and has another weight in the result: any two that are swapped
change it. Island 1 has flags of its own, and may write pieces of a program in another way that
gives the same values.
"""

import dataclasses
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet.testing import serve

NUM_RANKS = 4
SHAPE = (NUM_RANKS, 6)  # shape of a rank's block; the first dimension is divisible for scatters
FLAGS_OF_ISLAND_1 = "UNLIKE_FLAGS"

OPS = (
    "psum",
    "pmax",
    "ppermute",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "psum_unequal",
    "pmax_unequal",
)
_UNEQUAL = [[0, 1, 2], [3]]  # groups of ranks; the first one has ranks of both islands
FORMS = ("straight", "straight", "scan", "gradient", "remat", "inner", "cond", "vmap")
GRADIENTS = ("gradient", "remat")
_MATRIX = np.cos(np.arange(SHAPE[1] ** 2, dtype=np.float32)).reshape(SHAPE[1], SHAPE[1])

Function = Callable[..., jax.Array]


# --- values that are exchanged ---


def _scanned(v: jax.Array, c: float) -> jax.Array:
    def add(carry: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry * c + column, jnp.tanh(carry)

    return jax.lax.scan(add, v[:, 0], v.T)[1].T * 3


VALUES: Mapping[str, Function] = {
    "sin": lambda v, c: jnp.sin(v * c),
    "cos": lambda v, c: jnp.cos(v + c),
    "tanh": lambda v, c: jnp.tanh(v) - c,
    "exp": lambda v, c: jnp.exp(v * 0.3) * c,
    "square": lambda v, c: v * v + 2 * c,
    "sort": lambda v, c: jnp.sort(v * c, axis=1) + c,
    "matmul": lambda v, c: v @ _MATRIX + c,
    "scan": _scanned,
    "loop": lambda v, c: jax.lax.fori_loop(0, 3, lambda i, u: u * 0.5 + c, v),
}


# --- pieces: one way of island 0, and another way of island 1 with the same values ---


def _even_rows(v: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.mean(v, axis=1, keepdims=True), v.shape)


def _transposed_product(v: jax.Array) -> jax.Array:
    return jax.lax.dot_general(_MATRIX, v, (((0,), (1,)), ((), ()))).T


def _sums_by_scan(v: jax.Array) -> jax.Array:
    def add(carry: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry + column, carry + column

    return jax.lax.scan(add, jnp.zeros_like(v[:, 0]), v.T)[1].T


def _sorted_and_back(v: jax.Array) -> jax.Array:
    places = jnp.argsort(jnp.argsort(v, axis=1), axis=1)
    return jnp.take_along_axis(jnp.sort(v, axis=1), places, axis=1) * 2


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a program.

    Attributes:
      plain: The way of island 0, and of everybody where nothing is rewritten.
      rewritten: The way of island 1.
      words: An error that shows where the two ways begin to differ has one of them.
      is_even: Their derivatives need the same: both the argument, or neither.
    """

    plain: Function
    rewritten: Function
    words: tuple[str, ...]
    is_even: bool = True


PIECES: Mapping[str, Piece] = {
    "sort of even rows": Piece(
        _even_rows,
        lambda v: jnp.sort(jnp.flip(_even_rows(v), 1), axis=1),
        ("_flip", "rev"),
        is_even=False,
    ),
    "double transpose": Piece(lambda v: v * 2, lambda v: (v.T * 2).T, ("transpose",)),
    "double flip": Piece(jnp.abs, lambda v: jnp.flip(jnp.abs(jnp.flip(v, 1)), 1), ("_flip", "rev")),
    "reshape round trip": Piece(
        lambda v: v - 1, lambda v: (v.reshape(-1) - 1).reshape(v.shape), ("reshape",)
    ),
    "loop": Piece(
        lambda v: v + 3,
        lambda v: jax.lax.fori_loop(0, 3, lambda i, u: u + 1, v),
        ("scan", "while"),
    ),
    "sort of negatives": Piece(
        lambda v: jnp.sort(v, axis=1),
        lambda v: jnp.flip(-jnp.sort(-v, axis=1), 1),
        ("neg",),
    ),
    "sums by scan": Piece(lambda v: jnp.cumsum(v, axis=1), _sums_by_scan, ("scan", "broadcast")),
    "transposed product": Piece(lambda v: v @ _MATRIX, _transposed_product, ("dot_general",)),
    "sorted and back": Piece(
        lambda v: v * 2, _sorted_and_back, ("argsort", "sort", "iota"), is_even=False
    ),
}


# --- programs ---


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of a program.

    Attributes:
      op: One of `OPS`.
      value: One of `VALUES`, with its constant: what is exchanged.
      source: The earlier exchange whose result the value is made of, or None: the argument.
      before: A piece on the way to it, or None.
      after: A piece behind it, or None.
      weight: Factor of its result in the program's result.
    """

    op: str
    value: str
    constant: float
    source: int | None
    before: str | None
    after: str | None
    weight: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
      form: How the exchanges are called, one of `FORMS`.
      aside: A piece on which no exchange depends.
    """

    form: str
    aside: str
    exchanges: tuple[Exchange, ...]

    def with_swapped_weights(self, one: int, other: int) -> "Program":
        """Result of the program where the data of two exchanges are swapped."""
        swapped = list(self.exchanges)
        for here, there in ((one, other), (other, one)):
            weight = self.exchanges[there].weight
            swapped[here] = dataclasses.replace(self.exchanges[here], weight=weight)
        return dataclasses.replace(self, exchanges=tuple(swapped))


def make(
    seed: int,
    forms: Sequence[str] = FORMS,
    has_uneven: bool = False,
    has_lone_ranks: bool = True,
) -> Program:
    """The program of a seed.

    Args:
      seed: Seed of all choices.
      forms: Members of `FORMS` to choose from.
      has_uneven: Whether the pieces of a gradient may be of different kinds on two islands. Then
        one island's compiler may leave out an exchange that the other's derivative needs.
      has_lone_ranks: Whether a rank may be alone in its group. Such a rank completes exchanges
        without anybody else.
    """
    draw = random.Random(seed)
    form = draw.choice(forms)
    is_any = has_uneven or form not in GRADIENTS
    pieces = [name for name in sorted(PIECES) if is_any or PIECES[name].is_even]
    # JAX has no derivative of pmax.
    ops = [op for op in OPS if form not in GRADIENTS or not op.startswith("pmax")]
    ops = [op for op in ops if has_lone_ranks or not op.endswith("_unequal")]
    ops = draw.sample(ops, 1 if draw.random() < 0.6 else 3)
    count = draw.randint(3, 8)
    values = draw.sample(sorted(VALUES), count)
    exchanges = tuple(
        Exchange(
            op=draw.choice(ops),
            value=value,
            constant=draw.choice((0.5, 0.75, 1.25, 1.5)),
            source=draw.randrange(k) if k and draw.random() < 0.25 else None,
            before=draw.choice(pieces) if draw.random() < 0.4 else None,
            after=draw.choice(pieces) if draw.random() < 0.2 else None,
            weight=k + 1.5,
        )
        for k, value in enumerate(values)
    )
    return Program(form, draw.choice(pieces), exchanges)


def argument() -> np.ndarray:
    """The blocks of all ranks, one after the other."""
    rows = NUM_RANKS * SHAPE[0]
    return np.random.default_rng(7).uniform(-1, 1, (rows, SHAPE[1])).astype(np.float32)


def _cross(op: str, v: jax.Array) -> jax.Array:
    """One exchange; its result has the shape of a block."""
    ring = [(i, (i + 1) % NUM_RANKS) for i in range(NUM_RANKS)]
    weights = jnp.arange(1.0, NUM_RANKS + 1)
    # fmt: off
    return {"psum": lambda: jax.lax.psum(v, "x"), "pmax": lambda: jax.lax.pmax(v, "x"), "ppermute": lambda: jax.lax.ppermute(v, "x", ring), "all_gather": lambda: jnp.tensordot(weights, jax.lax.all_gather(v, "x"), 1), "psum_scatter": lambda: jnp.tile(jax.lax.psum_scatter(v, "x", tiled=True), (NUM_RANKS, 1)), "all_to_all": lambda: jax.lax.all_to_all(v, "x", 0, 0, tiled=True), "psum_unequal": lambda: jax.lax.psum(v, "x", axis_index_groups=_UNEQUAL), "pmax_unequal": lambda: jax.lax.pmax(v, "x", axis_index_groups=_UNEQUAL)}[op]()  # noqa: E501 (on one line: no source line tells them apart)
    # fmt: on


def _cross_without_groups(op: str, v: jax.Array) -> jax.Array:
    """The same as `_cross`, for `jax.vmap`, which has no groups."""
    if not op.endswith("_unequal"):
        return _cross(op, v)
    reduce = {"psum_unequal": jnp.sum, "pmax_unequal": jnp.max}[op]
    group = jax.lax.all_gather(v, "x")[: len(_UNEQUAL[0])]
    return jnp.where(jax.lax.axis_index("x") < len(_UNEQUAL[0]), reduce(group, axis=0), v)


def step(
    program: Program, piece: Callable[[str], Function], cross: Callable[..., jax.Array] = _cross
) -> Function:
    """The program of one rank: block to block.

    Args:
      program: The program.
      piece: The function to use for a piece, by its name.
      cross: The function that makes an exchange of an op and a value.
    """
    cross = jax.jit(cross, static_argnums=0) if program.form == "inner" else cross

    def straight(a: jax.Array) -> jax.Array:
        y = 1e-3 * piece(program.aside)(jnp.tanh(a))
        results: list[jax.Array] = []
        for e in program.exchanges:
            v = a if e.source is None else jnp.tanh(a + results[e.source] / 4)
            v = VALUES[e.value](v, e.constant)
            v = piece(e.before)(v) if e.before else v
            r = cross(e.op, v)
            results.append(r)
            y = y + e.weight * (piece(e.after)(r) if e.after else r)
        return y

    return _in_form(program.form, straight)


def _in_form(form: str, straight: Function) -> Function:
    def body(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = straight(carry + i / 8)
        return jnp.tanh(y / 32), y

    def scan(a: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(body, a, jnp.arange(3.0))[1], axis=0)

    def cond(a: jax.Array) -> jax.Array:
        is_any = jax.lax.pmax(jnp.max(a), "x") > -5
        return jax.lax.cond(is_any, straight, lambda v: straight(v) * 2, a)

    def vmap(a: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(straight)(jnp.stack([a, a * 0.5 + 0.1])), axis=0)

    forms = {"scan": scan, "cond": cond, "vmap": vmap, "remat": jax.checkpoint(straight)}
    return forms.get(form, straight)


def _of_all(program: Program, mapped: Function) -> Function:
    """The program as a function of all ranks' argument: their results, or the gradient of these."""
    if program.form not in GRADIENTS:
        return mapped
    factors = np.random.default_rng(8).uniform(0.5, 1.5, argument().shape).astype(np.float32)
    return jax.grad(lambda x: jnp.sum(mapped(x) * factors))


def right(program: Program) -> np.ndarray:
    """The result of all ranks, by JAX on one device: without islands, exchanges and rewriting."""

    def mapped(x: jax.Array) -> jax.Array:
        one = step(program, lambda name: PIECES[name].plain, _cross_without_groups)
        blocks = x.reshape(NUM_RANKS, *SHAPE)
        return jax.vmap(one, axis_name="x")(blocks).reshape(x.shape)

    fast = {"xla_backend_optimization_level": 0}
    return np.asarray(jax.jit(_of_all(program, mapped), compiler_options=fast)(argument()))


def right_and_change(program: Program) -> tuple[np.ndarray, float]:
    """The right result, and how much two exchanges of one kind would change it if swapped."""
    draw = random.Random(str(program))
    result = right(program)
    pairs = _pairs_of_one_op(program.exchanges)
    one, other = draw.choice(pairs)
    return result, float(np.max(np.abs(result - right(program.with_swapped_weights(one, other)))))


def _pairs_of_one_op(exchanges: Sequence[Exchange]) -> list[tuple[int, int]]:
    found = [(i, j) for j, e in enumerate(exchanges) for i in range(j) if exchanges[i].op == e.op]
    return found or [(0, 1)]


# --- the worker ---


def _declared(name: str) -> Function:
    return jaxhet.per_platform(PIECES[name].plain, island1=PIECES[name].rewritten)


def _undeclared(name: str) -> Function:
    piece = PIECES[name]
    return piece.rewritten if jax.process_index() == 1 else piece.plain


_CHOICES: Mapping[str, Callable[[str], Function]] = {
    "flags": lambda name: PIECES[name].plain,
    "declared": _declared,
    "undeclared": _undeclared,
}


def _run(program: Program, kind: str) -> dict[int, np.ndarray]:
    """This process's blocks of the result, by their first row."""
    mesh = jaxhet.make_mesh({"x": -1})
    sharding = NamedSharding(mesh, P("x"))
    data = argument()
    x = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
    one = step(program, _CHOICES[kind])
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    result = jaxhet.jit(_of_all(program, mapped), out_shardings=sharding)(x)
    jaxhet.block_until_ready(result)
    return {s.index[0].start or 0: np.asarray(s.data) for s in result.addressable_shards}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """A program's result, exchanges and error. `request` has `program`, and a `kind` of pieces."""
    before = jaxhet.stats()["exchanges_completed"]
    try:
        blocks, error = _run(request["program"], request["kind"]), None
    except jaxhet.JaxhetError as caught:
        blocks, error = {}, f"{type(caught).__name__}: {caught}"
    after = jaxhet.stats()["exchanges_completed"]
    return {"blocks": blocks, "error": error, "exchanges": after - before}


if __name__ == "__main__":
    import unlike_programs  # under this name requests are pickled

    if os.environ.get("JAXHET_PROCESS_ID") == "1":
        flags = (os.environ.get("XLA_FLAGS"), os.environ.get(FLAGS_OF_ISLAND_1))
        os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    serve(unlike_programs._answer)
