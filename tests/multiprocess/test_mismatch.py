"""Islands that run different programs are both told so, with the first difference of both sides."""

from two_islands import run_both

from tests.support.scripts import Ended

CALL = """
try:
    results = []
    for function in functions: results.append(jaxhet.block_until_ready(function(x)))
    print("numbers", results)
except jaxhet.PlanMismatchError as e: print("caught:", e)
"""


def run_functions(functions: str) -> list[Ended]:
    """Calls on each island what `functions` lists for it."""
    deadlines = {"JAXHET_DEADLINE_S": "3"}
    return run_both(functions + CALL, JAXHET_CPU_DEVICES="2", **deadlines)


def test_programs_that_differ_in_an_operation() -> None:
    one, other = (f'over_islands(lambda a: jax.lax.{name}(a, "x"))' for name in ("psum", "pmax"))
    for ended in run_functions(f"functions = [{one} if me == 0 else {other}]"):
        assert "numbers" not in ended.text
        told = ended.text.partition("caught:")[2]
        assert "all-reduce sum" in told, ended.text
        assert "all-reduce max" in told
        assert "is the first that differs" in told


def test_two_programs_in_another_order() -> None:
    functions = """
def first(a): return psum(a)
def second(a): return psum(a * 2) * 3
functions = [over_islands(f) for f in ((first, second) if me == 0 else (second, first))]
"""
    for ended in run_functions(functions):
        assert "numbers" not in ended.text
        assert "caught:" in ended.text, ended.text
        assert "jit_first" in ended.text.split("caught:")[1]
        assert "jit_second" in ended.text.split("caught:")[1]
