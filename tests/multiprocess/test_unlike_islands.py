"""Islands whose compilers see other programs: right numbers or an error, never a wrong number.

The islands are processes on CPUs, with all that belongs to a job. Island 1 compiles for AVX without
FMA and without some of XLA's passes (by XLA_FLAGS), and writes pieces of the programs in another
way that gives the same values. What is right comes from JAX on one device, without exchanges.
"""

import collections
import contextlib
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import unlike_programs
from two_islands import run_both
from unlike_programs import Program

from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job

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


def _outcome(program: Program, answers: list[dict[str, Any]]) -> str:
    """Outcome of a program: right, or refused or wrong and a message."""
    errors = [answer["error"] for answer in answers]
    if all(errors):
        return f"refused: {errors[0]}"
    blocks = {row: block for answer in answers for row, block in answer["blocks"].items()}
    result = np.concatenate([blocks[row] for row in sorted(blocks)])
    right, change = unlike_programs.right_and_change(program)
    scale = float(np.max(np.abs(right)))
    assert change > LEAST_CHANGE * scale, program  # or else a swap could go unnoticed
    if any(errors) or np.max(np.abs(result - right)) > TOLERANCE * scale:
        return f"wrong: {result}, not {right}; {errors}"
    return "right"


def _check(
    case: tuple[str, str], programs: Iterable[tuple[Program, str]], may_refuse: bool = False
) -> None:
    """Checks that each program is right on the islands of a case, or refused if it may be."""
    counts, exchanges, failures = collections.Counter[str](), 0, []
    with contextlib.closing(Islands(*case)) as islands:
        for program, kind in programs:
            answers = islands.ask(program, kind)
            name, _, message = _outcome(program, answers).partition(": ")
            counts[f"{kind} {name}"] += 1
            exchanges += min(answer["exchanges"] for answer in answers)
            if name == "wrong" or (name == "refused" and not may_refuse):
                failures.append(f"{name} {kind} {program}: {message}")
    print(f"{case}: {counts.total()} programs, {exchanges} exchanges: {dict(counts)}")
    assert not failures, "\n".join(failures)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "count"),
    [
        (CASES[3], 4),
        *(pytest.param(case, NUM_PROGRAMS, marks=pytest.mark.slow) for case in CASES),
    ],
    ids=str,
)
def test_programs_of_unlike_islands_are_right(case: tuple[str, str], count: int) -> None:
    first = NUM_PROGRAMS * CASES.index(case)
    seeds = range(first, first + count)
    _check(case, [(unlike_programs.make(s), ("flags", "declared")[s % 2]) for s in seeds])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, pytest.param(NUM_LOOSE, marks=pytest.mark.slow)])
def test_pieces_with_other_needs_are_right_or_refused(count: int) -> None:
    """Gradients through pieces: one way needs its argument, the other does not."""
    forms = unlike_programs.GRADIENTS
    programs = [unlike_programs.make(seed, forms, has_uneven=True) for seed in range(count)]
    _check(("flat", ""), [(program, "declared") for program in programs], may_refuse=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("passes", LOOSE_PASSES)
def test_programs_with_other_exchanges_are_right_or_refused(passes: str) -> None:
    programs = [(unlike_programs.make(seed), "declared") for seed in range(NUM_LOOSE)]
    _check(("flat", passes), programs, may_refuse=True)


# --- island 1 has an undeclared difference ---


def _words(program: Program) -> set[str]:
    """Words of the program's pieces; the first reported difference holds one of them."""
    names = {program.aside, *(p for e in program.exchanges for p in (e.before, e.after) if p)}
    return {word for name in names for word in unlike_programs.PIECES[name].words}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, pytest.param(NUM_UNDECLARED, marks=pytest.mark.slow)])
def test_undeclared_differences_are_refused(count: int) -> None:
    """By both processes, before any exchange, and with the first difference."""
    for seed in range(1000, 1000 + count):
        program = unlike_programs.make(seed, has_lone_ranks=False)
        with contextlib.closing(Islands(ALGORITHMS[seed % 2], "")) as islands:
            answers = islands.ask(program, "undeclared")
        for answer in answers:
            assert not answer["blocks"], (program, answer)
            assert answer["exchanges"] == 0, (program, answer)
            error = answer["error"]
            assert error.startswith("PlanMismatchError: "), error
            assert "is the first that differs" in error, error
            equations = error.split("is the first that differs")[1]
            assert any(word in equations for word in _words(program)), (program, error)


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
