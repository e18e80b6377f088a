"""`jaxhet.plan`: the exchanges of a program over islands, and their cost."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhet import _session
from jaxhet._errors import UsageError
from jaxhet._jax import compat
from jaxhet.compiler import hlo, overlap
from jaxhet.compiler import plan as plan_lib

_GROUPS_WIDTH = 24
_NOTHING = "nothing crosses islands"
_CHOSEN = "the option algorithm is flat, or auto on CPU"


@dataclasses.dataclass(frozen=True)
class PlannedExchange:
    """An exchange of a program.

    Attributes:
      index: place in the order of starts.
      collective: collective that the exchange belongs to: opcode, reducer, dimension.
      kind: pattern of movement: "permute", "all_gather" or "all_to_all".
      algorithm: "flat" (all ranks of a group exchange), "hierarchical" (on each island first, then
        over the rails) or "direct" (from each source to its targets).
      why: reason for a flat algorithm.
      shapes: shapes of each rank's operands, in HLO's notation.
      groups: ranks that exchange with each other; of a permute, pairs of source and target.
      num_bytes: largest number of bytes that a rank sends to other islands each time.
      num_collectives: number of the program's collectives that share the exchange.
      times: number of runs in each step; None: unknown (a loop that ends by a condition, or a
        branch), and counted as once.
      products: matrix products that are scheduled between its start and its done; None: not
        scheduled apart (on CPU).
      place: the program and the control flow around it.
      source: the user's operation and source line.
      wire: codec in which the bytes travel, with the size of its blocks ("mxint8/32"), or "".
      plain_bytes: with `wire`, the number of bytes without it.
    """

    index: int
    collective: str
    kind: str
    algorithm: str
    why: str
    shapes: str
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int
    num_collectives: int
    times: int | None
    products: int | None
    place: str
    source: str
    wire: str = ""
    plain_bytes: int = 0

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a rank sends to other islands in each step."""
        return self.num_bytes * _runs(self)

    @property
    def is_overlapped(self) -> bool:
        """Whether a matrix product is scheduled while it runs."""
        return bool(self.products)


_COMPUTED = ("why", "times", "products")
_OF_SPEC = [f.name for f in dataclasses.fields(PlannedExchange) if f.name not in _COMPUTED]


def _runs(exchange: PlannedExchange) -> int:
    """Runs in each step; one where the number is unknown."""
    return 1 if exchange.times is None else exchange.times


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """The exchanges of a program over islands in each step, that is, each time it is called.

    Attributes:
      exchanges: in the order of their starts; none if nothing crosses islands.
    """

    exchanges: tuple[PlannedExchange, ...]

    @property
    def exchanges_per_step(self) -> int:
        """Exchanges that a rank starts in each step, or at least starts (`is_exact`)."""
        return sum(map(_runs, self.exchanges))

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a rank sends to other islands in each step, or at least sends (`is_exact`)."""
        return sum(e.bytes_per_step for e in self.exchanges)

    @property
    def is_exact(self) -> bool:
        """Whether every `times` is known."""
        return all(e.times is not None for e in self.exchanges)

    def exposed_seconds(self, link_gb_per_s: float, latency_us: float = 0.0) -> float:
        """Time in each step of the exchanges that overlap with no matrix product.

        Sums times × (latency + bytes / bandwidth). So the exchanges share one link, one after the
        other, and none waits for a peer.

        Args:
          link_gb_per_s: bandwidth of a rank's link to other islands, in 1e9 bytes per second.
          latency_us: time of an exchange of no bytes.
        """
        exposed = [e for e in self.exchanges if not e.is_overlapped]
        runs = sum(map(_runs, exposed))
        num_bytes = sum(e.bytes_per_step for e in exposed)
        return runs * latency_us * 1e-6 + num_bytes / (link_gb_per_s * 1e9)

    def text(self) -> str:
        """The report as a table."""
        if not self.exchanges:
            return f"{_NOTHING}\n"
        reasons = dict.fromkeys(e.why for e in self.exchanges if e.why)
        notes = {why: number for number, why in enumerate(reasons, 1)}
        lines = _table([_HEAD, *(_row(e, notes) for e in self.exchanges)])
        at_least = "" if self.is_exact else "at least "
        lines += [
            "",
            f"exchanges in each step: {at_least}{self.exchanges_per_step}; bytes that a rank sends"
            f" to other islands: {at_least}{_bytes(self.bytes_per_step)}",
        ]
        lines += [f"[{number}] {why}" for why, number in notes.items()]
        return "\n".join([*(line.rstrip() for line in lines), ""])

    def __str__(self) -> str:
        """The table of `text`, without its last line break."""
        return self.text().rstrip("\n")

    def to_json(self) -> str:
        """The report as a JSON object: `exchanges`, and the totals."""
        fields: dict[str, Any] = {
            "exchanges": [dataclasses.asdict(e) for e in self.exchanges],
            "exchanges_per_step": self.exchanges_per_step,
            "bytes_per_step": self.bytes_per_step,
            "is_exact": self.is_exact,
        }
        return json.dumps(fields, indent=2)


def plan(jitted: Any, *args: Any, **kwargs: Any) -> PlanReport:
    """Lists the exchanges over islands of a jitted function, in the running job.

    The function is lowered and compiled, and not run. On GPUs the report counts the products that
    XLA scheduled between the start and the done of each exchange. Any process may call this alone.

    Args:
      jitted: the result of `jax.jit` or `jaxhet.jit`; or, without arguments, of its `lower` or
        `compile`.
      *args: the function's arguments, or `jax.ShapeDtypeStruct`s with shardings.
      **kwargs: likewise.

    Returns:
      The report; without exchanges in a job of one island, or where nothing crosses islands.

    Raises:
      UsageError: `jaxhet.initialize` was not called, this is no jitted function, or the program
        can't run over islands.

    Examples:
      >>> report = jaxhet.plan(jax.jit(lambda x: x.sum()), x)
      >>> print(report)
    """
    session = _session.required()
    if session.is_pretended:
        raise UsageError("the command `jaxhet plan` asks by itself; return the jitted function")
    try:
        compiled = _compile(to_stage(jitted, args, kwargs))
    except (RuntimeError, ValueError) as error:  # JAX has both, by the kind of program
        if ours := session.translate(error):
            raise ours from error
        raise
    modules = compat.serialized_modules(compiled.runtime_executable())
    return PlanReport(tuple(e for module in modules for e in of_module(module).exchanges))


def to_stage(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Lowered or compiled form of a user's program.

    Raises:
      UsageError: it can't be lowered.
    """
    if is_stage(jitted) and not args and not kwargs:
        return jitted
    if is_stage(jitted) or not hasattr(jitted, "lower"):
        what = getattr(jitted, "__name__", type(jitted).__name__)
        raise UsageError(
            f"{what} is no jitted function; give what jax.jit or jaxhet.jit returned, and its"
            " arguments, or what its `lower` returned, alone"
        )
    return jitted.lower(*args, **kwargs)


def is_stage(value: Any) -> bool:
    """Whether a value is a lowered or compiled function."""
    return hasattr(value, "as_text")


def of_module(module: bytes) -> PlanReport:
    """The report of a compiled, scheduled module. Pure."""
    parsed = hlo.Module(module)
    plan = plan_lib.collect(parsed)
    if plan is None:
        return PlanReport(())
    products, times = overlap.products(parsed), overlap.times(parsed)
    return PlanReport(
        tuple(
            PlannedExchange(
                **{name: getattr(spec, name) for name in _OF_SPEC},
                why=spec.note or (_CHOSEN if spec.algorithm == "flat" else ""),
                times=times[spec.index],
                products=products.get(spec.index),
            )
            for spec in plan.exchanges
        )
    )


def _compile(stage: Any) -> Any:
    return stage if hasattr(stage, "runtime_executable") else stage.compile()


_HEAD = ("#", "collective", "kind", "algorithm", "bytes", "times", "overlap", "groups", "source")


def _row(e: PlannedExchange, notes: Mapping[str, int]) -> tuple[str, ...]:
    count = f"{e.num_collectives} × " if e.num_collectives > 1 else ""
    products = "product" if e.products == 1 else "products"
    groups = ",".join(f"{{{','.join(map(str, group))}}}" for group in e.groups)
    if len(groups) > _GROUPS_WIDTH:
        groups = groups[: _GROUPS_WIDTH - 1] + "…"
    return (
        str(e.index),
        count + e.collective,
        e.kind,
        f"{e.algorithm} [{notes[e.why]}]" if e.why else e.algorithm,
        f"{_bytes(e.num_bytes)} for {_bytes(e.plain_bytes)}, {e.wire}"
        if e.wire
        else _bytes(e.num_bytes),
        "unknown" if e.times is None else str(e.times),
        "not scheduled" if e.products is None else f"{e.products} {products}",
        groups,
        e.source,
    )


def _bytes(count: int) -> str:
    """Text of a number of bytes, in units of powers of 1000."""
    size, units = float(count), iter(("kB", "MB", "GB", "TB"))
    unit = "B"
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
