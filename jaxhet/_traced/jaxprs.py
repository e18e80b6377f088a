"""The program as JAX traced it: numbers for its equations, and what tells it from other programs.

Vendors' compilers differ in what they make of a program; its jaxpr is the same on all islands. So
an exchange is known by the number of its equation, and a program by a digest of its jaxpr.
"""

import dataclasses
import functools
import hashlib
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxhet._traced.functions import function_text
from jaxhet.compiler import PER_PLATFORM

# Primitives that take time, and those that only move data between devices.
_HEAVY = frozenset(
    (
        "cholesky",
        "conv_general_dilated",
        "custom_call",
        "dot_general",
        "eigh",
        "fft",
        "geqrf",
        "householder_product",
        "lu",
        "pallas_call",
        "ragged_dot_general",
        "scatter",
        "scatter-add",
        "sort",
        "svd",
        "top_k",
        "triangular_solve",
    )
)
_MOVES = frozenset(
    (
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "pbroadcast",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "reduce_scatter",
    )
)
_CONTROL_FLOW = frozenset(("cond", "scan", "while"))
_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-f]+")
_DIGEST_BYTES = 8
_MOST_IDS_SHOWN = 16


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr in words.

    Attributes:
      name: Name of the module.
      digest: Equal for equal jaxprs on every platform, in hexadecimal; constants and literals
        count, source lines do not.
      lines: One for each equation; its source line follows a tab.
    """

    name: str
    digest: str
    lines: tuple[str, ...]

    def listing(self, most_bytes: int | None = None) -> str:
        """A line with name and digest, then the lines.

        Args:
          most_bytes: Size at which the listing is cut; a digest stands for the rest.
        """
        kept, num_bytes = [f"{self.name} {self.digest}"], 0
        for number, line in enumerate(self.lines):
            num_bytes += len(line) + 1
            if most_bytes is not None and num_bytes > most_bytes:
                rest = self.lines[number:]
                digest = _digest("\n".join(line.partition("\t")[0] for line in rest))
                kept.append(f"({len(rest)} more lines, digest {digest}; JAXHET_DUMP has them all)")
                break
            kept.append(line)
        return "\n".join([*kept, ""])


# --- numbers ---


@dataclasses.dataclass(frozen=True)
class _Depths:
    """Operations that take time, on the longest way through a jaxpr.

    Attributes:
      equations: For each equation, how many are on the way to its result if it is one of them, else
        on the way to its operands.
      uses: For each equation, the depth at which the first of them that uses its result may start;
        None if there is none.
      operands: The same for each operand of the jaxpr.
      results: How many are on the way to each result of the jaxpr.
    """

    equations: tuple[int, ...]
    uses: tuple[int | None, ...]
    operands: tuple[int | None, ...]
    results: tuple[int, ...]


_depths: weakref.WeakKeyDictionary[Any, _Depths] = weakref.WeakKeyDictionary()


def labels(jaxpr: core.Jaxpr) -> list[str]:
    """A name for each equation of a jaxpr, not of those inside.

    `e500d12u14` is equation 500; 12 operations that take time must run before what XLA makes of it
    to move data between devices, and 14 before the first that uses its result. A sum of gradients
    is written after the backward pass, and may start in the middle of it: exchanges are ordered by
    these depths. In a jaxpr inside an equation they count from its start.
    """
    found = _depths_of(jaxpr)
    pairs = zip(found.equations, found.uses, strict=True)
    return [f"e{number}{_depth_label(*pair)}" for number, pair in enumerate(pairs)]


def argument_labels(jaxpr: core.Jaxpr) -> list[str]:
    """The end of a name for each operand of a program: `d0u14`, as in `labels`."""
    return [_depth_label(0, use) for use in _depths_of(jaxpr).operands]


def _depth_label(depth: int, use: int | None) -> str:
    return f"d{depth}" if use is None else f"d{depth}u{use}"


def _depths_of(jaxpr: core.Jaxpr) -> _Depths:
    if (found := _depths.get(jaxpr)) is not None:
        return found
    starts: list[int] = []
    depth: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        start = max((depth.get(v, 0) for v in eqn.invars if isinstance(v, core.Var)), default=0)
        starts.append(start)
        depth |= {v: start + more for v, more in zip(eqn.outvars, _added_by(eqn), strict=True)}
    use: dict[Any, int] = {}
    uses: list[int | None] = []
    for eqn, start in zip(reversed(jaxpr.eqns), reversed(starts), strict=True):
        own = _least(use.get(v) for v in eqn.outvars)
        # An operation inside an equation may compute any of its results.
        is_known = len({use.get(v) for v in eqn.outvars}) == 1 or not any(_jaxprs_in(eqn.params))
        uses.append(own if is_known else None)
        for v, inner in zip(eqn.invars, _used_by(eqn), strict=True):
            found_use = own if inner is None else start + inner
            if found_use is not None and isinstance(v, core.Var):
                use[v] = min(found_use, use.get(v, found_use))
    outvars = (v if isinstance(v, core.Var) else None for v in jaxpr.outvars)
    return _depths.setdefault(
        jaxpr,
        _Depths(
            tuple(
                start + (eqn.primitive.name in _HEAVY)
                for eqn, start in zip(jaxpr.eqns, starts, strict=True)
            ),
            tuple(reversed(uses)),
            tuple(use.get(v) for v in jaxpr.invars),
            tuple(depth.get(v, 0) for v in outvars),
        ),
    )


def _least(depths: Iterable[int | None]) -> int | None:
    return min((depth for depth in depths if depth is not None), default=None)


def _takes_time(eqn: core.JaxprEqn) -> bool:
    """Whether an equation counts as one operation, whatever is in it."""
    name = eqn.primitive.name
    return name in _HEAVY or name in _MOVES or name in _CONTROL_FLOW or is_declared(eqn)


def _is_unrolled(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["unroll"] == eqn.params["length"]


def _used_by(eqn: core.JaxprEqn) -> Sequence[int | None]:
    """For each operand, the depth in an equation at which it is used; None: by no operation."""
    count = len(eqn.invars)
    if _takes_time(eqn) and not _is_unrolled(eqn):
        return [0] * count
    inner = next(_jaxprs_in(eqn.params), None)
    operands = _depths_of(inner).operands if inner is not None else ()
    return operands if len(operands) == count else [_least(operands)] * count


def _added_by(eqn: core.JaxprEqn) -> Sequence[int]:
    """The depth that an equation adds to each of its results."""
    count = len(eqn.outvars)
    if _takes_time(eqn) and not _is_unrolled(eqn):
        return [1] * count
    inner = next(_jaxprs_in(eqn.params), None)
    results = _depths_of(inner).results if inner is not None else (0,)
    if _is_unrolled(eqn):
        results = [max(results, default=0) * eqn.params["length"]]
    return results if len(results) == count else [max(results, default=0)] * count


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr):
                yield item


def is_declared(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a piece that the user declared to differ between platforms."""
    return str(eqn.params.get("name", "")).startswith(PER_PLATFORM)


# --- words ---


def describe(
    name: str,
    jaxpr: core.Jaxpr,
    arguments: Sequence[Any],
    location: Callable[[core.JaxprEqn], str],
) -> Program:
    """A jaxpr in words, and its digest.

    Args:
      name: Name of the module.
      jaxpr: The whole program.
      arguments: Further parts of the program: shardings of its arguments and results.
      location: The source line of an equation, or "".
    """
    listing = _Listing(location)
    listing.add(f"arguments {text(arguments)}", "")
    listing.add_jaxpr(jaxpr, "")
    return Program(name, listing.digest(), listing.lines())


class _Listing:
    """The equations of a program, line by line."""

    def __init__(self, location: Callable[[core.JaxprEqn], str]):
        self._location = location
        self._lines: list[tuple[str, str]] = []
        self._bodies: dict[str, int] = {}  # inner jaxprs by digest, in the order of their listing

    def add(self, line: str, where: str) -> None:
        """Adds a line; where it was written does not count."""
        line = " ".join(line.split())
        self._lines.append((line, where))

    def add_jaxpr(self, jaxpr: core.Jaxpr, path: str) -> None:
        """Adds the equations of a jaxpr, and of those inside it that were not there before."""
        names: dict[Any, str] = {}
        for letter, variables in (("c", jaxpr.constvars), ("a", jaxpr.invars)):
            names |= {v: f"{letter}{i}" for i, v in enumerate(variables)}
        consts = map(text, jaxpr.consts)
        types = " ".join(f"{name}:{_type(v)}" for v, name in names.items())
        self.add(" ".join(filter(None, (f"{path}in", types, *consts))), "")
        for number, eqn in enumerate(jaxpr.eqns):
            self._add_equation(eqn, f"{path}e{number}", names)
        self.add(f"{path}out {self._atoms(jaxpr.outvars, names)}", "")

    def _add_equation(self, eqn: core.JaxprEqn, path: str, names: dict[Any, str]) -> None:
        own = path.rpartition("/")[2]
        single = len(eqn.outvars) == 1
        names |= {v: own if single else f"{own}.{i}" for i, v in enumerate(eqn.outvars)}
        types = " ".join(map(_type, eqn.outvars))
        words = [f"{path}: {types} = {eqn.primitive.name}"]
        inner: list[tuple[str, core.Jaxpr]] = []
        for key, value in sorted(eqn.params.items()):
            if value is None or key in _SKIPPED or (is_declared(eqn) and key != "name"):
                continue
            if key == "callback" and eqn.primitive.name == "pure_callback":
                words.append(f"callback={function_text(value.callback_func, text)}")
                continue
            words.append(f"{key}={self._param(value, f'{path}/{key}', inner)}")
        words.append(self._atoms(eqn.invars, names))
        self.add(" ".join(words), self._location(eqn))
        for inner_path, jaxpr in inner:
            self.add_jaxpr(jaxpr, f"{inner_path}/")

    def _param(self, value: Any, path: str, inner: list[tuple[str, core.Jaxpr]]) -> str:
        if isinstance(value, core.Jaxpr):
            digest = _digest_of_body(value)
            if digest not in self._bodies:
                self._bodies[digest] = len(self._bodies)
                inner.append((path, value))
            return f"body {self._bodies[digest]}"
        if isinstance(value, tuple | list) and any(isinstance(v, core.Jaxpr) for v in value):
            bodies = (self._param(v, f"{path}{i}", inner) for i, v in enumerate(value))
            return f"({', '.join(bodies)})"
        return text(value)

    def _atoms(self, atoms: Sequence[Any], names: Mapping[Any, str]) -> str:
        return " ".join(
            f"{text(a.val)}:{_type(a)}" if isinstance(a, core.Literal) else names.get(a, "_")
            for a in atoms
        )

    def digest(self) -> str:
        """Digest of all lines without their source lines."""
        return _digest("\n".join(line for line, _ in self._lines))

    def lines(self) -> tuple[str, ...]:
        """All lines with their source lines."""
        return tuple(f"{line}\t{where}" if where else line for line, where in self._lines)


# Parameters that are not part of what is computed: functions that rules call later, names for
# people, and what differs from process to process.
_SKIPPED = frozenset(
    (
        "bwd",
        "compiler_options_kvs",
        "ctx_mesh",
        "debug_info",
        "donated_invars",
        "fwd",
        "fwd_jaxpr_thunk",
        "in_layouts",
        "inline",
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "keep_unused",
        "name_and_src_info",
        "out_layouts",
        "out_trees",
        "resource_env",
    )
)

_body_digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _digest_of_body(jaxpr: core.Jaxpr) -> str:
    if (found := _body_digests.get(jaxpr)) is None:
        listing = _Listing(lambda eqn: "")
        listing.add_jaxpr(jaxpr, "")
        found = _body_digests[jaxpr] = listing.digest()
    return found


def _digest(words: str) -> str:
    return hashlib.blake2b(words.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _type(variable: Any) -> str:
    return variable.aval.str_short(short_dtypes=True)


@functools.singledispatch
def text(value: Any) -> str:
    """A parameter in words that are the same in every process: no addresses, no order of sets."""
    if isinstance(value, jax.Array):
        return _array_text(value)
    if isinstance(value, core.Primitive):
        return value.name
    if isinstance(value, core.Jaxpr):  # deep in a parameter, as Pallas has them
        return f"body {_digest_of_body(value)}"
    if isinstance(value, jax.sharding.NamedSharding):
        return f"{value.spec} on {text(value.mesh)}"
    if isinstance(value, jax.sharding.SingleDeviceSharding):  # each process names another device
        return "on one device"
    if isinstance(value, jax.sharding.AbstractMesh):  # which knows the kind of device
        return f"mesh {dict(value.shape)}"
    if isinstance(value, jax.sharding.Mesh):
        return _mesh_text(value)
    if isinstance(value, type):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
        return f"{type(value).__name__}{text(fields)}"
    if callable(value) and not isinstance(value, np.generic):
        return f"function {getattr(value, '__qualname__', type(value).__qualname__)}"
    return _ADDRESS.sub("", str(value))


@text.register
def _(value: dict) -> str:
    items = sorted((text(k), text(v)) for k, v in value.items())
    return "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"


@text.register(tuple)
@text.register(list)
def _(value: Sequence[Any]) -> str:
    fields = getattr(value, "_fields", None)
    if fields is not None:
        return f"{type(value).__name__}{text(dict(zip(fields, value, strict=True)))}"
    return "(" + ", ".join(map(text, value)) + ")"


@text.register(set)
@text.register(frozenset)
def _(value: set[Any]) -> str:
    return "{" + ", ".join(sorted(map(text, value))) + "}"


@text.register(bool)
@text.register(int)
@text.register(str)
@text.register(type(None))
def _(value: Any) -> str:
    return repr(value)


@text.register
def _(value: float) -> str:
    return repr(value) if math.isfinite(value) else _array_text(np.asarray(value))


@text.register
def _(value: bytes) -> str:
    return f"{len(value)} bytes {_digest_of_bytes(value)}"


@text.register(np.ndarray)
@text.register(np.generic)
def _(value: np.ndarray) -> str:
    return _array_text(value)


@functools.lru_cache(maxsize=64)
def _mesh_text(mesh: jax.sharding.Mesh) -> str:
    ids = [] if mesh.empty else [device.id for device in mesh.devices.flat]
    if len(ids) > _MOST_IDS_SHOWN:
        ids = f"{len(ids)} devices {_digest(str(ids))}"
    return f"mesh {dict(mesh.shape)} of {ids}"


def _array_text(value: Any) -> str:
    """Type, shape and value of a constant; of a long one, a digest."""
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return f"{kind} {text(value.sharding)}"  # nobody has all of its values
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{kind} {_array_text(jax.random.key_data(value))}"
        value = np.asarray(value)
    data = np.ascontiguousarray(value).tobytes()
    if value.size == 1 and np.all(np.isfinite(value.astype(complex))):
        return f"{value.item()!r}"
    return f"{kind} {_digest_of_bytes(data)}"


def _digest_of_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
