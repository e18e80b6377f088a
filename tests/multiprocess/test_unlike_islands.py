"""Islands whose compilers see other programs: right numbers or an error, never a wrong number.

The islands are processes on CPUs, with all that belongs to a job. Island 1 compiles for AVX without
FMA and without some of XLA's passes (by XLA_FLAGS), and writes pieces of the programs in another
way that gives the same values. What is right comes from JAX on one device, without exchanges.
"""

import collections
import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import unlike_programs
from two_islands import run_both
from unlike_programs import Program

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job, world_job

pytestmark = pytest.mark.early

WORKER = pathlib.Path(unlike_programs.__file__)
SHAPE = Shape(2, 1, unlike_programs.NUM_RANKS // 2)
ALGORITHMS = ("flat", "hierarchical")
# Passes that island 1 leaves out. They change what XLA makes of a program and no value.
PASSES = ("", "algsimp", "cse", "constant_folding,simplify-sorts", "reshape-decomposer")
# Without these, XLA combines, inlines or unrolls otherwise: the exchanges themselves differ.
LOOSE_PASSES = ("fusion", "cpu-all-reduce-combiner", "simplify-while-loops")
CASES = [(algorithm, passes) for passes in PASSES for algorithm in ALGORITHMS]
NUM_PROGRAMS = 30  # programs per case
NUM_LOOSE = 20  # programs of a case in which they may be refused
NUM_UNDECLARED = 40

# Arithmetic without FMA differs in the last bits. A swap changes the result by far more.
TOLERANCE = 1e-5
LEAST_CHANGE = 1e-3


@pytest.fixture(scope="module")
def world() -> Iterator[Job]:
    """One device, where programs run without islands."""
    one = world_job(1, WORKER, FAST_COMPILE)
    yield one
    one.close()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
      name: "right", "wrong" or "refused".
      exchanges: Least number of exchanges of each process.
      message: Message about an outcome that is not right.
    """

    name: str
    exchanges: int
    message: str


class Islands:
    """A job of unlike islands; a new one where an error has ended the last one."""

    def __init__(self, algorithm: str, passes: str):
        disabled = f"--xla_disable_hlo_passes={passes}" if passes else ""
        self._env = {
            **FAST_COMPILE,
            unlike_programs.FLAGS_OF_ISLAND_1: f"--xla_cpu_max_isa=AVX {disabled}",
            "JAXHET__ALGORITHM": algorithm,
            "JAXHET_DEADLINE_S": "30",
        }
        self._job: Job | None = None

    def ask(self, program: Program, kind: str) -> list[dict[str, Any]]:
        """Runs a program; the answer of each process."""
        if self._job is None:
            self._job = island_job(SHAPE, WORKER, self._env)
        answers = self._job.ask({"program": program, "kind": kind})
        if any(answer["error"] for answer in answers):
            self.close()
        return answers

    def close(self) -> None:
        """Ends the job."""
        if self._job is not None:
            self._job.close()
            self._job = None


def _is_close(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    scale = float(np.max(np.abs(other)))
    return bool(np.max(np.abs(one - other)) <= tolerance * scale)


def _outcome(answers: list[dict[str, Any]], right: np.ndarray, title: str) -> Outcome:
    exchanges = min(answer["exchanges"] for answer in answers)
    errors = [answer["error"] for answer in answers]
    if all(errors):
        return Outcome("refused", exchanges, f"{title}: {errors[0]}")
    blocks = {row: block for answer in answers for row, block in answer["blocks"].items()}
    result = np.concatenate([blocks[row] for row in sorted(blocks)])
    if any(errors) or not _is_close(result, right, TOLERANCE):
        return Outcome("wrong", exchanges, f"{title}: {result}, not {right}; {errors}")
    return Outcome("right", exchanges, "")


def _run_programs(
    islands: Islands, world: Job, programs: Iterable[tuple[Program, str]]
) -> list[tuple[str, Outcome]]:
    """Runs programs of some kinds; the kind and the outcome of each."""
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for program, kind in programs:
            asked = pool.submit(world.ask, {"program": program, "kind": "right"})
            answers = islands.ask(program, kind)
            told = asked.result()[0]
            title = f"{kind} {program}"
            # Or else a swap could go unnoticed.
            assert told["change"] > LEAST_CHANGE * np.max(np.abs(told["result"])), title
            outcomes.append((kind, _outcome(answers, told["result"], title)))
    return outcomes


def _run_case(
    case: tuple[str, str],
    programs: Iterable[tuple[Program, str]],
    world: Job,
    record: Callable[[str, object], None],
) -> dict[str, list[str]]:
    """Runs programs on the islands of a case; the messages of each outcome."""
    islands = Islands(*case)
    try:
        outcomes = _run_programs(islands, world, programs)
    finally:
        islands.close()
    counts = collections.Counter(f"{kind} {outcome.name}" for kind, outcome in outcomes)
    exchanges = sum(outcome.exchanges for _, outcome in outcomes)
    told = f"{case}: {len(outcomes)} programs, {exchanges} exchanges: {dict(counts)}"
    print(told)
    record("programs", told)
    messages: dict[str, list[str]] = {"right": [], "refused": [], "wrong": []}
    for _, outcome in outcomes:
        messages[outcome.name].append(outcome.message)
    return messages


def _assert_all_right(
    case: tuple[str, str], count: int, world: Job, record: Callable[[str, object], None]
) -> None:
    first = NUM_PROGRAMS * CASES.index(case)
    seeds = range(first, first + count)
    programs = [(unlike_programs.make(s), ("flags", "declared")[s % 2]) for s in seeds]
    messages = _run_case(case, programs, world, record)
    assert not messages["wrong"], "\n".join(messages["wrong"])
    assert not messages["refused"], "\n".join(messages["refused"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "count"),
    [
        (CASES[3], 4),
        *(pytest.param(case, NUM_PROGRAMS, marks=pytest.mark.slow) for case in CASES),
    ],
    ids=str,
)
def test_programs_of_unlike_islands_are_right(
    case: tuple[str, str],
    count: int,
    world: Job,
    record_property: Callable[[str, object], None],
) -> None:
    _assert_all_right(case, count, world, record_property)


def _assert_none_wrong(
    passes: str,
    programs: Iterable[Program],
    world: Job,
    record: Callable[[str, object], None],
) -> None:
    told = _run_case(("flat", passes), [(p, "declared") for p in programs], world, record)
    assert not told["wrong"], "\n".join(told["wrong"])


def _uneven_programs(count: int) -> list[Program]:
    """Gradients through pieces: one way needs its argument, the other does not."""
    forms = unlike_programs.GRADIENTS
    return [unlike_programs.make(seed, forms, has_uneven=True) for seed in range(count)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, pytest.param(NUM_LOOSE, marks=pytest.mark.slow)])
def test_pieces_with_other_needs_are_right_or_refused(
    count: int, world: Job, record_property: Callable[[str, object], None]
) -> None:
    _assert_none_wrong("", _uneven_programs(count), world, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("passes", LOOSE_PASSES)
def test_programs_with_other_exchanges_are_right_or_refused(
    passes: str, world: Job, record_property: Callable[[str, object], None]
) -> None:
    programs = [unlike_programs.make(seed) for seed in range(NUM_LOOSE)]
    _assert_none_wrong(passes, programs, world, record_property)


# --- island 1 has an undeclared difference ---


def _words(program: Program) -> set[str]:
    """Words of the program's pieces; the first reported difference holds one of them."""
    names = {program.aside, *(p for e in program.exchanges for p in (e.before, e.after) if p)}
    return {word for name in names for word in unlike_programs.PIECES[name].words}


def _assert_refused(seeds: Iterable[int], record: Callable[[str, object], None]) -> None:
    """Checks that both processes refuse each program before any exchange; counts the programs."""
    counts = collections.Counter[str]()
    for seed in seeds:
        islands = Islands(ALGORITHMS[seed % 2], "")
        program = unlike_programs.make(seed, has_lone_ranks=False)
        try:
            answers = islands.ask(program, "undeclared")
        finally:
            islands.close()
        counts["programs"] += 1
        counts["exchanges written"] += len(program.exchanges)
        for answer in answers:
            _assert_shows_the_difference(program, answer)
            counts["refusals"] += 1
    told = f"undeclared differences: {dict(counts)}"
    print(told)
    record("undeclared", told)


def _assert_shows_the_difference(program: Program, answer: dict[str, Any]) -> None:
    assert not answer["blocks"], (program, answer)
    assert answer["exchanges"] == 0, (program, answer)
    error = answer["error"]
    assert error.startswith("PlanMismatchError: "), error
    assert "is the first that differs" in error, error
    equations = error.split("is the first that differs")[1]
    assert any(word in equations for word in _words(program)), (program, error)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, pytest.param(NUM_UNDECLARED, marks=pytest.mark.slow)])
def test_undeclared_differences_are_refused(
    count: int, record_property: Callable[[str, object], None]
) -> None:
    _assert_refused(range(1000, 1000 + count), record_property)


# --- declared pieces ---

PIECE = """
piece = jaxhet.per_platform(one, island1=other)
try:
    got = np.asarray(jaxhet.block_until_ready(over_islands(step)(x)).addressable_data(0))
    print("right" if np.allclose(got, want) else f"wrong: {got} is not {want}")
except jaxhet.JaxhetError as e: print("caught:", type(e).__name__, e)
"""


# Sums over ranks, and sums of an array that XLA's partitioner turns into exchanges.
INSIDE = {
    "shard_map": "total = psum",
    "jit": """
total = lambda v: jnp.sum(v, axis=0)
over_islands = lambda f: jaxhet.jit(f, out_shardings=NamedSharding(mesh, P()))""",
}


@pytest.mark.parametrize(
    "what",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.slow)
        for i, name in enumerate(INSIDE)
    ],
)
def test_exchanges_inside_a_declared_piece_are_refused(what: str) -> None:
    body = f"""{INSIDE[what]}
def one(a):
    s = total(jnp.sin(a)); c = total(jnp.cos(a))
    return s * 2 + c * 30
def other(a):
    c = total(jnp.cos(a)); s = total(jnp.sin(a))
    return s * 2 + c * 30
step, want = (lambda a: piece(a * 1)), mesh.size * (np.sin(1) * 2 + np.cos(1) * 30)
"""
    for ended in run_both(body + PIECE):
        assert "wrong" not in ended.text, ended.text
        assert "caught: " in ended.text, ended.text


# The last one may be refused, which ends the job: the exchange that one way does not need is used
# elsewhere, too.
_PIECES = {
    "leaves out an argument": """
def one(v, w): return v + jnp.sin(w) * 0
def other(v, w): return v
step, want = (lambda a: psum(piece(a * 3, a))), mesh.size * 3
""",
    "chooses another layout": """
def one(v): return jnp.cumsum(v, axis=1)
def other(v):
    add = lambda carry, column: (carry + column, carry + column)
    return jax.lax.scan(add, jnp.zeros_like(v[:, 0]), v.T)[1].T
def step(a):
    rows = jnp.stack([jnp.tile(a * factor, (mesh.size, 1)) for factor in (1, 0.5)])
    v = jax.vmap(lambda u: piece(jnp.cos(u)))(rows)
    return jax.lax.psum_scatter(v, "x", scatter_dimension=1, tiled=True).sum(0)
want = mesh.size * np.cumsum(np.cos(np.ones(6)) + np.cos(np.full(6, 0.5)))
""",
    "leaves out the result of an exchange": """
def one(v): return jnp.sin(v) * 0 + 3
def other(v): return jnp.full_like(v, 3)
def step(a):
    p = psum(a)
    q = psum(piece(p) * a * 100)
    return p + psum(jnp.sort(jnp.sort(a)) * 7) * 1.5 + q * 2.5 + psum(jnp.sort(a * 1.5)) * 11
want = mesh.size * (1 + 7 * 1.5 + 300 * 2.5 + 1.5 * 11)
""",
}


def test_declared_pieces_are_right_or_refused() -> None:
    script = "".join(f"{body}print({name!r}, end=': ')\n{PIECE}" for name, body in _PIECES.items())
    *firsts, last = _PIECES
    for ended in run_both(script):
        for name in firsts:
            assert f"{name}: right" in ended.text, ended.text
        told = ended.text.partition(f"{last}: ")[2]  # the log of the error comes before its words
        assert "wrong" not in told, ended.text
        assert "right" in told or "caught: PlanMismatchError" in told, ended.text
