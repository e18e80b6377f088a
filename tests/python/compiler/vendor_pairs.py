"""Compiles programs that a vendor's compiler once ordered in its own way.

A process of its own: `vendor_pairs.py {cuda|rocm} [NAME...]` prints a line of JSON for each program
of `PROGRAMS`, or of these names: its name, then the plan and what each exchange moves, as
`vendor_programs.py` does, or the words of a refusal.
"""

import functools
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet._errors import JaxhetError
from jaxhet._pretended import deviceless
from jaxhet.compiler import Options
from tests.python.compiler.drawn_programs import Program
from tests.python.compiler.install_plugins import PLUGINS
from tests.python.compiler.vendor_programs import Compiler

Array = jax.Array
Function = Callable[[Array], Array]

_NUM_DEVICES = 4
_ISLAND_SIZE = 2


def _program(function: Function, shape: tuple[int, ...], bucket_bytes: int) -> Program:
    def lower(devices: Sequence[Any]) -> Any:
        mesh = Mesh(np.array(devices[:_NUM_DEVICES]), ("data",))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, "float32"))

    return Program(lower, _ISLAND_SIZE, Options(bucket_bytes=bucket_bytes), is_partitioned=False)


def _sum(x: Array) -> Array:
    """Every sum of these programs is written on one line."""
    return lax.psum(x, "data")


def _named(number: int, function: Function) -> Function:
    def run(x: Array) -> Array:
        with jax.named_scope(f"name_{number}"):
            return function(x)

    return run


def _weighted_sums(functions: Sequence[Function], x: Array, y: Array) -> Array:
    for k, function in enumerate(functions):
        y = y + (k + 1.5) * _sum(_named(k, function)(x))
    return y


# --- a factor and a product of one matrix ---

_INPUTS: Mapping[str, Function] = {
    "m": lambda m: m,
    "m.T @ m + I": lambda m: m.T @ m + jnp.eye(8),
    "m + I": lambda m: m + jnp.eye(8),
    "exp(m)": jnp.exp,
    "m * m": lambda m: m * m,
    "m / trace": lambda m: m / jnp.trace(m),
    "outer(m[0]) + I": lambda m: jnp.outer(m[0], m[0]) + jnp.eye(8),
}


def _factor_and_product(before: Function, has_sine: bool, m: Array) -> Array:
    factor = _named(0, lambda x: jnp.linalg.cholesky(before(x)))(m)
    product = _named(1, lambda x: before(x) @ x)(m)
    sine = _sum(_named(2, jnp.sin)(m)) if has_sine else 0
    one, other = _sum(factor), _sum(product)
    return sine + one - 2 * other


# --- pairs of linear algebra ---


def _positive(x: Array) -> Array:
    return jnp.outer(x, x)[:8, :8] + 99 * jnp.eye(8, dtype=x.dtype)


_ALGEBRA: Mapping[str, Function] = {
    "cholesky": lambda x: jnp.linalg.cholesky(_positive(x)).reshape(64),
    "q": lambda x: jnp.linalg.qr(_positive(x))[0].reshape(64),
    "r": lambda x: jnp.linalg.qr(_positive(x))[1].reshape(64),
    "eigh": lambda x: jnp.linalg.eigh(_positive(x))[1].reshape(64),
    "svd": lambda x: jnp.linalg.svd(_positive(x))[0].reshape(64),
    "lu": lambda x: lax.linalg.lu(_positive(x))[0].reshape(64),
    "inverse": lambda x: jnp.linalg.inv(_positive(x)).reshape(64),
    "solve": lambda x: jnp.linalg.solve(_positive(x), jnp.eye(8)).reshape(64),
    "triangular solve": lambda x: jax.scipy.linalg.solve_triangular(
        _positive(x), jnp.eye(8)
    ).reshape(64),
    "product": lambda x: (_positive(x) @ _positive(x)).reshape(64),
    "product + 1": lambda x: (_positive(x) @ _positive(x) + 1).reshape(64),
    "sine": jnp.sin,
}


def _of_algebra(names: Sequence[str], x: Array) -> Array:
    return _weighted_sums([_ALGEBRA[name] for name in names], x, jnp.zeros_like(x))


# --- large arrays that are alike, beside an operation that vendors write differently ---

_LARGE = 1 << 17  # elements: more than a bucket takes
_AT = np.array([3, 3, 5])


def _scans(factor: int) -> Function:
    return lambda x: lax.fori_loop(0, 3, lambda i, y: y * factor + jnp.sin(y), x)


_SETS: Mapping[str, Sequence[Function]] = {
    "factors": [lambda x, k=k: k * x for k in (2, 3, 5, 7)],
    "scatters": [
        lambda x: x.at[_AT].add(x[:3]),
        lambda x: x.at[_AT].max(x[:3]),
        lambda x: x.at[_AT].min(x[:3]),
        lambda x: x.at[_AT].mul(x[:3]),
    ],
    "scans": [_scans(k) for k in (2, 3, 5, 7)],
    "sorts": [jnp.sort, lambda x: jnp.sort(x, descending=True)],
}


def _attention(m: Array) -> Array:
    weights = jnp.exp(m @ m.T)
    return (weights @ m) / weights.sum(-1, keepdims=True)


_BESIDE: Mapping[str, Function] = {
    "svd": lambda m: jnp.linalg.svd(m)[0],
    "tanh of each vendor": lambda m: lax.platform_dependent(
        m, cuda=jnp.tanh, rocm=lambda m: 1 - 2 / (jnp.exp(2 * m) + 1)
    ),
    "attention of each vendor": lambda m: lax.platform_dependent(
        m, cuda=lambda m: jax.nn.softmax(m @ m.T) @ m, rocm=_attention
    ),
}


def _alike(functions: Sequence[Function], beside: Function, x: Array) -> Array:
    extra = beside(x[:64].reshape(8, 8)).reshape(64)
    return _weighted_sums(functions, x, jnp.zeros_like(x).at[:64].add(extra))


# --- a program inside another one ---


def _exported(names: Sequence[str]) -> Program:
    def lower(devices: Sequence[Any]) -> Any:
        mesh = Mesh(np.array(devices[:_NUM_DEVICES]), ("data",))
        f = functools.partial(_of_algebra, names)
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        x = jax.ShapeDtypeStruct((64,), "float32", sharding=NamedSharding(mesh, P()))
        exported = jax.export.export(jax.jit(mapped), platforms=("cuda", "rocm"))(x)
        return jax.jit(exported.call).lower(x)

    return Program(lower, _ISLAND_SIZE, Options(bucket_bytes=0), is_partitioned=False)


# --- all of them ---


def _programs() -> dict[str, Program]:
    found: dict[str, Program] = {}
    buckets = (Options().bucket_bytes, 0)
    for bucket_bytes in buckets:
        end = "" if bucket_bytes else ", no bucket"
        for (name, before), has_sine in itertools.product(_INPUTS.items(), (False, True)):
            f = functools.partial(_factor_and_product, before, has_sine)
            title = f"cholesky and product of {name}{' and a sine' if has_sine else ''}{end}"
            found[title] = _program(f, (8, 8), bucket_bytes)
        for names in (*itertools.combinations(_ALGEBRA, 2), tuple(_ALGEBRA)):
            title = " and ".join(names) if len(names) == 2 else "all of linear algebra"
            f = functools.partial(_of_algebra, names)
            found[title + end] = _program(f, (64,), bucket_bytes)
    found["exported sine and product"] = _exported(("sine", "product"))
    for (name, functions), (beside, extra) in itertools.product(_SETS.items(), _BESIDE.items()):
        f = functools.partial(_alike, functions, extra)
        found[f"{name} beside {beside}"] = _program(f, (_LARGE,), buckets[0])
    return found


PROGRAMS = _programs()


def main(vendor: deviceless.Vendor, names: Sequence[str]) -> None:
    sys.path.append(str(PLUGINS))
    compiler = Compiler(vendor)
    for name in names or PROGRAMS:
        try:
            result = compiler.compile_program(PROGRAMS[name])
        except JaxhetError as error:
            result = {"refused": str(error)}
        except Exception:  # reported with the others
            result = {"error": traceback.format_exc()}
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main(cast(deviceless.Vendor, sys.argv[1]), sys.argv[2:])
