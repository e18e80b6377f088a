"""The stub of the extension has the signatures that nanobind's generator finds in it.

Docstrings and the element types of lists and dicts are the stub's own: nanobind knows neither.
"""

import ast
import pathlib

import pytest

from jaxhet import _ffi

stubgen = pytest.importorskip("nanobind.stubgen", reason="nanobind is installed with make setup")

_STUB = pathlib.Path(__file__).parents[2] / "jaxhet" / "_engine.pyi"


def _signatures(text: str) -> dict[str, tuple[str, str]]:
    """Arguments and type of the result by name; of a constant, its type."""
    found = {}

    def add(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                returns = ast.unparse(node.returns) if node.returns else ""
                found[prefix + node.name] = ast.unparse(node.args), returns
            elif isinstance(node, ast.AnnAssign):
                found[ast.unparse(node.target)] = "", ast.unparse(node.annotation)

    add(ast.parse(text).body, "")
    return found


def _generated() -> str:
    generator = stubgen.StubGen(_ffi._engine)
    generator.put(_ffi._engine)
    return generator.get()


def test_stub_has_the_signatures_that_nanobind_generates():
    ours, generated = _signatures(_STUB.read_text()), _signatures(_generated())
    assert len(generated) > 20
    assert {name: args for name, (args, _) in ours.items()} == {
        name: args for name, (args, _) in generated.items()
    }
    for name, (_, kind) in generated.items():
        assert ours[name][1].partition("[")[0] == kind.partition("[")[0], name
        if "[" in kind:  # nanobind knows the elements
            assert ours[name][1] == kind
