"""The program as JAX traced it: numbers of its equations, and the program's digest.

Vendors' compilers transform a program differently; its jaxpr is the same on all islands. So the
number of an equation identifies an exchange, and a digest of the jaxpr identifies a program.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxhet._traced import functions, words
from jaxhet._traced.words import Describer, Held
from jaxhet.compiler import PER_PLATFORM

# Primitives that take time; then primitives that only move data between devices.
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
_MOST_WORDS = 200  # longest parameter in bytes that an error shows as a whole


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr in words.

    Attributes:
      name: Name of the module.
      digest: Equal for equal jaxprs on every platform, in hexadecimal; constants and literals
        count, source lines do not.
      lines: One for each equation; its source line follows a tab.
      held: Objects of this process that no line describes.
    """

    name: str
    digest: str
    lines: tuple[str, ...]
    held: tuple[Held, ...] = ()

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
                digest = words.digest("\n".join(line.partition("\t")[0] for line in rest))
                kept.append(f"({len(rest)} more lines, digest {digest}; JAXHET_DUMP has them all)")
                break
            kept.append(line)
        return "\n".join([*kept, ""])


# --- numbers ---


@dataclasses.dataclass(frozen=True)
class _Depths:
    """Numbers of operations that take time on the longest path through a jaxpr.

    Attributes:
      equations: For each equation, the number on the path to its result if it takes time
        itself, else on the path to its operands.
      uses: For each equation, the depth at which the first operation that takes time and uses its
        result may start; None if no such operation exists.
      operands: For each operand of the jaxpr, the depth of its first use; None without one.
      results: For each result of the jaxpr, the number on the path to it.
    """

    equations: tuple[int, ...]
    uses: tuple[int | None, ...]
    operands: tuple[int | None, ...]
    results: tuple[int, ...]


_depths: weakref.WeakKeyDictionary[Any, _Depths] = weakref.WeakKeyDictionary()


def labels(jaxpr: core.Jaxpr) -> list[str]:
    """A name for each equation of a jaxpr; equations of inner jaxprs get theirs elsewhere.

    `e500d12u14` is equation 500. 12 operations that take time must run before its collectives, and
    14 before the first such operation that uses its result. A sum of gradients
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
        # Any of the results may come from an operation inside of the equation.
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
    """Whether an equation counts as one operation that takes time, with all that it contains."""
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
    settings: Mapping[str, str] | None = None,
) -> Program:
    """A jaxpr in words, and its digest.

    Args:
      name: Name of the module.
      jaxpr: The whole program.
      arguments: Further parts of the program: shardings of its arguments and results, its devices.
      location: The source line of an equation, or "".
      settings: Settings of JAX that the program is lowered with, by name.
    """
    listing = _Listing(location)
    for setting, value in (settings or {}).items():
        listing.add(f"setting {setting} = {value}", "")
    listing.add(f"arguments {listing.text(arguments, lambda: 'its arguments')}", "")
    listing.add_jaxpr(jaxpr, "")
    return Program(name, listing.digest(), listing.lines(), tuple(listing.held))


def describe_value(value: Any) -> tuple[str, list[Held]]:
    """A value or function in words, and the objects of this process that they do not describe."""
    describer = Describer(_body)
    return describer.text(value), describer.held


class _Listing:
    """The equations of a program, line by line."""

    def __init__(self, location: Callable[[core.JaxprEqn], str], has_places: bool = True):
        self.held: list[Held] = []
        self._location = location
        self._has_places = has_places
        self._lines: list[tuple[str, str]] = []
        self._bodies: dict[str, int] = {}  # inner jaxprs by digest, in the order of their listing

    def add(self, line: str, where: str) -> None:
        """Adds a line; its source line is not part of the digest."""
        line = " ".join(line.split())
        self._lines.append((line, where))

    def add_jaxpr(self, jaxpr: core.Jaxpr, path: str) -> None:
        """Adds the equations of a jaxpr, and of inner jaxprs that were not added before."""
        names: dict[Any, str] = {}
        for letter, variables in (("c", jaxpr.constvars), ("a", jaxpr.invars)):
            names |= {v: f"{letter}{i}" for i, v in enumerate(variables)}
        consts = [self.text(const, lambda: "a constant") for const in jaxpr.consts]
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
        parts = [f"{path}: {types} = {eqn.primitive.name}", *_context_words(eqn.ctx)]
        inner: list[tuple[str, core.Jaxpr]] = []
        for key, value in sorted(_counted(eqn).items()):
            parts.append(f"{key}={self._param(value, eqn, key, f'{path}/{key}', inner)}")
        parts.append(self._atoms(eqn.invars, names))
        self.add(" ".join(parts), self._location(eqn) if self._has_places else "")
        for inner_path, jaxpr in inner:
            self.add_jaxpr(jaxpr, f"{inner_path}/")

    def _param(
        self,
        value: Any,
        eqn: core.JaxprEqn,
        key: str,
        path: str,
        inner: list[tuple[str, core.Jaxpr]],
    ) -> str:
        if isinstance(value, core.Jaxpr):
            digest, held = _digest_of_body(value, self._location)
            if digest not in self._bodies:
                self._bodies[digest] = len(self._bodies)
                inner.append((path, value))
            else:
                self.held += held
            return f"body {self._bodies[digest]}"
        if isinstance(value, tuple | list) and any(isinstance(v, core.Jaxpr) for v in value):
            bodies = (self._param(v, eqn, key, f"{path}{i}", inner) for i, v in enumerate(value))
            return f"({', '.join(bodies)})"

        def place() -> str:
            where = self._location(eqn)
            return f"parameter {key} of {eqn.primitive.name}{f' at {where}' if where else ''}"

        if key == "callback" and eqn.primitive.name in ("io_callback", "pure_callback"):
            callback: Any = value  # a function, and the tree of its arguments
            function = callback.callback_func
            if functions.only_raises(function):  # nothing that it reads is in a result
                call = functions.code_text(function.__code__)
                return f"{function.__qualname__} {call} {self.text(callback.in_tree, place)}"
            if eqn.primitive.name == "io_callback":
                call = self.text(function, place, is_private=True)
                return f"{call} {self.text(callback.in_tree, place)}"
        found = self.text(value, place)
        return found if len(found) < _MOST_WORDS else f"{words.digest(found)} {found}"

    def text(self, value: Any, place: Callable[[], str], is_private: bool = False) -> str:
        """Words of a value. Records the objects that words do not describe."""
        describer = Describer(
            lambda jaxpr: _digest_of_body(jaxpr, self._location), place, is_private
        )
        found = describer.text(value)
        self.held += describer.held
        return found

    def _atoms(self, atoms: Sequence[Any], names: Mapping[Any, str]) -> str:
        return " ".join(
            f"{words.number_text(a.val)}:{_type(a)}"
            if isinstance(a, core.Literal)
            else names.get(a, "_")
            for a in atoms
        )

    def digest(self) -> str:
        """Digest of all lines without their source lines."""
        return words.digest("\n".join(line for line, _ in self._lines))

    def lines(self) -> tuple[str, ...]:
        """All lines with their source lines."""
        return tuple(f"{line}\t{where}" if where else line for line, where in self._lines)


# Parameters that do not affect what a primitive of JAX computes: functions that rules call before a
# program is lowered, names for readers, and values that differ between processes.
_SKIPPED = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_lin": ("bwd",),
    "custom_vjp_call": ("bwd", "fwd", "fwd_jaxpr_thunk", "out_trees"),
    "custom_vmap_call": ("rule",),
    "jit": (
        "compiler_options_kvs",
        "ctx_mesh",
        "donated_invars",
        "in_layouts",
        "inline",
        "keep_unused",
        "out_layouts",
        "resource_env",
    ),
    "linear_call": ("transpose_thunk",),
    "pallas_call": ("name_and_src_info",),
    "remat_opt": ("fun_jaxpr_thunk",),
}
# Primitives that call a function of this process and may return nothing to the program.
_WATCHERS = frozenset(("debug_callback", "debug_print", "inspect_sharding", "io_callback"))


def _counted(eqn: core.JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation that affect its results."""
    name = eqn.primitive.name
    if is_declared(eqn):
        return {"name": eqn.params["name"]}
    if name in _WATCHERS and not eqn.outvars:
        return {}
    skipped = _SKIPPED.get(name, ())
    return {k: v for k, v in eqn.params.items() if v is not None and k not in skipped}


# Parts of a context that a line omits: types show the mesh, and a layout changes no value.
_NOT_COUNTED_CONTEXT = ("__weakref__", "configs", "cur_abstract_mesh", "cur_layout_mode")


@functools.lru_cache(maxsize=64)
def _context_words(context: Any) -> tuple[str, ...]:
    names = [n for n in type(context).__slots__ if n not in _NOT_COUNTED_CONTEXT]
    held = {name: getattr(context, name, None) for name in names}
    found = [f"{name}={describe_value(value)[0]}" for name, value in held.items() if value]
    partitionable = "threefry_partitionable=True"
    return tuple(w for w in found if w != partitionable) + (
        () if partitionable in found else ("threefry_partitionable=False",)
    )


_body_digests: weakref.WeakKeyDictionary[Any, tuple[str, tuple[Held, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _digest_of_body(
    jaxpr: core.Jaxpr, location: Callable[[core.JaxprEqn], str]
) -> tuple[str, tuple[Held, ...]]:
    if (found := _body_digests.get(jaxpr)) is None:
        listing = _Listing(location, has_places=False)
        listing.add_jaxpr(jaxpr, "")
        found = _body_digests[jaxpr] = listing.digest(), tuple(listing.held)
    return found


def _body(jaxpr: core.Jaxpr) -> tuple[str, tuple[Held, ...]]:
    return _digest_of_body(jaxpr, lambda eqn: "")


def _type(variable: Any) -> str:
    return variable.aval.str_short(short_dtypes=True)
