"""Islands that run different programs are both told so, with the first difference of both sides."""

import pytest
from two_islands import run_both

from tests.support.scripts import Ended

DIFFERENT = {  # by difference: the function of each island, and the words of each in the error
    "operation": (
        'lambda a: jax.lax.psum(a, "x")',
        'lambda a: jax.lax.pmax(a, "x")',
        ("all-reduce sum", "all-reduce max"),
    ),
    "order of a group": (
        'lambda a: jax.lax.all_gather(a, "x", axis_index_groups=[[0, 2], [1, 3]])',
        'lambda a: jax.lax.all_gather(a, "x", axis_index_groups=[[2, 0], [1, 3]])',
        ("{{0,2},{1,3}}", "{{2,0},{1,3}}"),
    ),
}
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


def assert_both_are_told(first: str, second: str, words: tuple[str, ...]) -> None:
    """Checks what the islands say that run these two functions."""
    for ended in run_functions(f"functions = [over_islands(({first}) if me == 0 else ({second}))]"):
        assert "numbers" not in ended.text
        assert "caught:" in ended.text, ended.text
        told = ended.text.split("caught:")[1]
        assert all(word in told for word in words), told
        assert "is the first that differs" in told


@pytest.mark.parametrize("what", DIFFERENT)
def test_programs_that_differ_in(what: str) -> None:
    assert_both_are_told(*DIFFERENT[what])


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


def test_programs_of_one_factory_in_another_order() -> None:
    functions = """
def make(transform): return over_islands(lambda a: psum(transform(a)))
transforms = [jnp.sin, lambda a: 7 * a * a + 3, lambda a: jnp.tanh(a @ a.T) @ a]
functions = [make(t) for t in (transforms if me == 0 else reversed(transforms))]
"""
    for ended in run_functions(functions):
        assert "numbers [" not in ended.text
        told = ended.text.split("caught:")[1]
        assert "another program of the same name, jit(<lambda>)" in told
        assert "is the first that differs" in told
        assert "= sin " in told
        assert "= transpose " in told
