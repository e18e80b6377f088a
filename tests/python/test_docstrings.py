"""Docstrings of public functions: `Args:`, `Raises:`, and examples of the main ones."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_MAIN = (
    *("initialize", "islands", "make_mesh", "jit", "block_until_ready", "per_platform", "plan"),
    *("paths", "stats", "check_replicas", "sync_replicas", "unlike_islands"),
)
_LEAST_DOCUMENTED = 3  # parameters of a function that needs `Args:`


def _public_names() -> dict[str, set[str]]:
    """The public names of each file of `jaxhet`."""
    stub = (_ROOT / "jaxhet" / "__init__.pyi").read_text()
    names: dict[str, set[str]] = {}
    for module, name in re.findall(r"^from (\S+) import \S+ as (\S+)$", stub, re.MULTILINE):
        names.setdefault(f"{module.replace('.', '/')}.py", set()).add(name)
    return names


def _files() -> list[str]:
    models = (str(path.relative_to(_ROOT)) for path in (_ROOT / "models").rglob("*.py"))
    return [*_public_names(), "jaxhet/optim.py", "jaxhet/testing.py", *sorted(models)]


def _is_public(name: str, public: set[str] | None) -> bool:
    return name in public if public is not None else not name.startswith("_")


def _public_functions(
    tree: ast.Module, public: set[str] | None
) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods; of all names, or of `public` ones."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_public(node.name, public):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and _is_public(node.name, public):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def _has_raise(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Raise) for node in _body(function))


def _raises(function: ast.FunctionDef, checks: set[str]) -> bool:
    """Whether a function raises itself, or calls one of its file that checks and raises."""
    calls = {ast.unparse(node.func) for node in _body(function) if isinstance(node, ast.Call)}
    return _has_raise(function) or bool(calls & checks)


def _parameters(function: ast.FunctionDef) -> list[str]:
    a = function.args
    positional = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    names = [p.arg for p in (*positional, a.vararg, a.kwarg) if p is not None]
    return [name for name in names if name not in ("self", "cls")]


def _documented(doc: str) -> set[str]:
    """The parameters that a docstring's `Args:` names."""
    section = re.search(r"^Args:\n((?:(?:  .*)?\n)*)", f"{doc}\n", re.MULTILINE)
    return set(re.findall(r"^  \*{0,2}(\w+): \S", section[1], re.MULTILINE)) if section else set()


def _problems(source: str, public: set[str] | None = None) -> list[str]:
    """Missing sections of a file's public functions."""
    tree = ast.parse(source)
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    checks = {f.name for f in top if f.name.lstrip("_").startswith("check") and _has_raise(f)}
    found = []
    for name, function in _public_functions(tree, public):
        doc = ast.get_docstring(function) or ""
        missing = [p for p in _parameters(function) if p not in _documented(doc)]
        if len(_parameters(function)) >= _LEAST_DOCUMENTED and missing:
            found.append(f"{name} has no Args: of {', '.join(missing)}")
        if _raises(function, checks) and not re.search(r"^Raises:\n  \w", doc, re.MULTILINE):
            found.append(f"{name} has no Raises:")
    return found


@pytest.mark.parametrize("file", _files())
def test_public_functions_document_parameters_and_errors(file: str) -> None:
    assert not _problems((_ROOT / file).read_text(), _public_names().get(file))


@pytest.mark.parametrize("name", _MAIN)
def test_main_functions_have_an_example(name: str) -> None:
    """tests/python/test_project.py runs them."""
    files = {name: file for file, names in _public_names().items() for name in names}
    tree = ast.parse((_ROOT / files[name]).read_text())
    doc = dict(_public_functions(tree, {name}))[name]
    assert re.search(r"^Examples:\n", ast.get_docstring(doc) or "", re.MULTILINE)
