"""Who may know whom: the one door to each outside thing, and the direction of dependency."""

import ast
import functools
import pathlib
import re
import types
from collections.abc import Iterator

import pytest

from tests.support.commands import python

_ROOT = pathlib.Path(__file__).parents[2]
_PLUGIN = _ROOT / "xla_plugin"

# C++: a folder may include from itself and from earlier levels.
_LEVELS = [
    {"base"},
    {"device"},
    {"net"},
    {"transport"},
    {"engine/common"},
    {"engine/control"},
    {"engine/host", "engine/device"},
    {"engine"},
    {"ffi"},
    {"python"},
]

# Includes and calls that are allowed in one place only: pattern -> folder or file below xla_plugin.
_CPP_DOORS = {
    r"#include [<\"]infiniband/": "net/verbs/",
    r"\"_?ibv_\w+\"": "net/verbs/",  # entry points by their names
    r"#include [<\"]openssl/|\"(EVP_\w+|HMAC|OpenSSL_\w+)\"": "base/libcrypto.h",
    r"#include [<\"](cuda|hip/|hsa/)": "device/",
    r"#include \"xla_plugin/device/(cuda|hip)/": "device/",
    r"\"(cu|hip)[A-Z]\w+\"|\"hsa_\w+\"": "device/",
    r"#include [<\"]xla/": "ffi/",
    r"#include [<\"](nanobind/|Python\.h)": "python/",
}

# Python: module -> the files that may import it, as prefixes of paths from the root.
_PYTHON_DOORS = {
    "jax._src": (
        "jaxhet/_jax/compat.py",
        "jaxhet/_jax/device_put.py",
        "jaxhet/_jax/first_use.py",
        "jaxhet/_jax/platforms.py",
        "jaxhet/_jax/compiler_settings.py",
        "jaxhet/_jax/programs.py",
        "jaxhet/_jax/jaxlib.py",
        "jaxhet/_jax/slices.py",
        "tests/gpu/mirror_double.py",
        "tests/multiprocess/new_collectives.py",
        "tests/multiprocess/published/jax_tests.py",
        "tests/python/compiler/",
        "tests/python/models/test_llama.py",
        "tests/python/test_certificates.py",
        "tests/python/test_clusters.py",
        "tests/python/test_jax_compat.py",
        "tests/python/test_compiler_settings.py",
        "tests/python/test_jax_programs.py",
        "tests/python/test_jax_replacements.py",
        "tests/python/test_shared_programs.py",
        "tests/python/test_topology_mirror.py",
    ),
    "jaxlib": ("jaxhet/_jax/compat.py", "jaxhet/_jax/jaxlib.py", "tests/python/compiler/"),
    "cryptography": (
        "jaxhet/_net/certificates.py",
        "jaxhet/_net/channel.py",
        "tests/python/test_handshake.py",
    ),
    "jaxhet._engine": ("jaxhet/_ffi.py",),
    "psutil": ("jaxhet/_net/interfaces.py",),
    "nanobind": (),
}

# Python: folder -> what it may import of the project; "jaxhet" itself means its public names.
_MAY_IMPORT = {
    "jaxhet/compiler/": ("jaxhet.compiler", "jaxhet._errors"),
    "jaxhet/cli/": (
        "jaxhet:public",
        "jaxhet.cli",
        "jaxhet._auto",
        "jaxhet._clusters",
        "jaxhet._config",
        "jaxhet._pretended",
        "jaxhet._doctor",
        "jaxhet._errors",
        "jaxhet._jax.jaxlib",
        "jaxhet._json",
        "jaxhet._job",
        "jaxhet._launch",
        "jaxhet._net",
        "jaxhet._options",
        "jaxhet._plan",
        "jaxhet._telemetry.TRACE_FILE",
    ),
    "jaxhet/": ("jaxhet",),
    "models/": ("models", "jaxhet:public"),
    "benchmarks/": ("benchmarks", "models", "jaxhet:public", "jaxhet.testing"),
}
_OWN = ("jaxhet", "models", "benchmarks", "tests")

# Rooms of jaxhet: its folders and top-level files. A room may import from rooms of earlier lines.
_ROOMS = (
    "_errors _json _vendors",
    "_options",
    "_config",
    "_log",
    "_net",
    "_jax",
    "compiler",
    "_traced",
    "_job",
    "_clusters _launch _memory",
    "_engine",
    "_ffi",
    "_gpu _islands _qualification _saves",
    "_device_channels",
    "_compilation",
    "_session",
    "_telemetry",
    "_microscaling",
    "_handles",
    "optim",
    "_jit _mesh _paths _per_platform _plan _saving",
    "_balance _device_put _replicas",
    "_set_up",
    "_distributed",
    "_initialize",
    "_auto _doctor _pretended testing",
    "cli",
)


def _files(folder: pathlib.Path, *patterns: str) -> list[pathlib.Path]:
    return sorted(path for pattern in patterns for path in folder.rglob(pattern))


def _name(path: pathlib.Path) -> str:
    return path.relative_to(_ROOT).as_posix()


@functools.cache
def _imports(path: pathlib.Path) -> tuple[str, ...]:
    return tuple(_parsed_imports(path))


def _parsed_imports(path: pathlib.Path) -> Iterator[str]:
    """Every dotted name that a file imports; `from a import b` counts as `a.b`."""
    package = path.relative_to(_ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _is_public_jaxhet(name: str) -> bool:
    return re.fullmatch(r"jaxhet(\.[a-z]\w*|\.[A-Z]\w*)?", name) is not None


def _may_import(name: str, allowed: tuple[str, ...]) -> bool:
    if not any(_is_in(name, own) for own in _OWN):
        return True
    if "jaxhet:public" in allowed and _is_public_jaxhet(name):
        return True
    return any(_is_in(name, module) for module in allowed)


_PYTHON = [p for f in (*_OWN, "tools") for p in _files(_ROOT / f, "*.py")]
_CPP = _files(_PLUGIN, "*.h", "*.cc")


def _cpp_folder(name: str) -> str:
    """The folder of a file of xla_plugin. Each subfolder of the engine is a level."""
    parts = name.split("/")[:-1]
    return "/".join(parts[: 2 if parts[0] == "engine" else 1])


def test_cpp_includes_go_down_the_levels():
    level = {folder: i for i, folders in enumerate(_LEVELS) for folder in folders}
    wrong = []
    for path in _CPP:
        own = _cpp_folder(path.relative_to(_PLUGIN).as_posix())
        for header in re.findall(r'#include "xla_plugin/([^"]+)"', path.read_text()):
            folder = _cpp_folder(header)
            if folder != own and level[folder] >= level[own]:
                wrong.append(f"{_name(path)} includes {header}")
    assert not wrong


def _room(name: str) -> str:
    """The room of an imported name; "" outside jaxhet."""
    return name.split(".")[1] if name.startswith("jaxhet.") else ""


def test_rooms_are_the_folders_and_files_of_jaxhet():
    jaxhet = _ROOT / "jaxhet"
    rooms = {path.relative_to(jaxhet).parts[0] for path in _files(jaxhet, "*.py")}
    named = [room for line in _ROOMS for room in line.split()]
    assert sorted(named) == sorted(
        {r.removesuffix(".py") for r in rooms} - {"__init__"} | {"_engine"}
    )


def test_rooms_import_from_earlier_ones_only():
    level = {room: i for i, line in enumerate(_ROOMS) for room in line.split()}
    wrong = []
    for path in _files(_ROOT / "jaxhet", "*.py"):
        own = path.relative_to(_ROOT / "jaxhet").parts[0].removesuffix(".py")
        for name in _imports(path):
            room = _room(name)
            if room not in (own, "") and level[room] >= level[own]:
                wrong.append(f"{_name(path)} imports {name}")
    assert not wrong


def _module(path: pathlib.Path) -> str:
    return _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_modules_of_jaxhet_do_not_import_one_another_in_a_circle():
    """Imports inside functions count, too."""
    files = {_module(path): path for path in _files(_ROOT / "jaxhet", "*.py")}
    imported: dict[str, set[str]] = {}
    for module, path in files.items():
        names = {n if n in files else n.rpartition(".")[0] for n in _imports(path)}
        imported[module] = names & files.keys() - {module, "jaxhet"}
    while leaves := {module for module, names in imported.items() if not names}:
        imported = {m: names - leaves for m, names in imported.items() if m not in leaves}
    assert not imported, "modules in a circle, or that import one: " + ", ".join(imported)


def test_cpp_includes_start_at_the_root():
    wrong = []
    for path in _CPP:
        for header in re.findall(r'#include "([^"]+)"', path.read_text()):
            if not (_ROOT / header).exists() and not header.startswith("xla/"):
                wrong.append(f"{_name(path)} includes {header}")
    assert not wrong


def test_transports_do_not_know_each_other():
    """But for `device_channel`, which is no transport: it is how devices use them."""
    wrong = []
    for path in _files(_PLUGIN / "transport", "*/*.h", "*/*.cc"):
        for other in re.findall(r'#include "xla_plugin/transport/(\w+)/', path.read_text()):
            if other not in (path.parent.name, "device_channel"):
                wrong.append(f"{_name(path)} includes transport/{other}/")
    assert not wrong


@pytest.mark.parametrize("pattern", _CPP_DOORS)
def test_cpp_door(pattern: str):
    door = f"xla_plugin/{_CPP_DOORS[pattern]}"
    inside = [_name(path) for path in _CPP if re.search(pattern, path.read_text())]
    assert not [name for name in inside if not name.startswith(door)]


def test_cpp_does_not_read_the_environment():
    """Python does, and hands the engine its options."""
    assert not [_name(path) for path in _CPP if re.search(r"\bgetenv\s*\(", path.read_text())]


@pytest.mark.parametrize("module", _PYTHON_DOORS)
def test_python_door(module: str):
    inside = [_name(path) for path in _PYTHON if any(_is_in(n, module) for n in _imports(path))]
    assert not [name for name in inside if not name.startswith(_PYTHON_DOORS[module])]


def test_python_imports_follow_the_direction_of_dependency():
    wrong = []
    for path in _PYTHON:
        folder = next((f for f in _MAY_IMPORT if _name(path).startswith(f)), None)
        for name in _imports(path):
            if folder and not _may_import(name, _MAY_IMPORT[folder]):
                wrong.append(f"{_name(path)} imports {name}")
    assert not wrong


def test_no_file_reads_the_environment_but_by_the_table_of_options():
    """`JAXHET_*` is read in _config.py only, so that each option has a type, a check and a doc."""
    pattern = r"(environ(\.get)?|getenv)\s*[\[(]\s*f?[\"']JAXHET_"
    inside = [
        _name(p) for p in _files(_ROOT / "jaxhet", "*.py") if re.search(pattern, p.read_text())
    ]
    assert not inside


@pytest.mark.parametrize("module", ["jaxhet.cli", "jaxhet._job.coordinator_process"])
def test_launcher_and_coordinator_do_without_jax(module: str):
    script = f"import sys, {module}; print(sorted({{'jax', 'numpy'}} & sys.modules.keys()))"
    assert python("-c", script).stdout == "[]\n"


def test_no_two_test_files_have_one_name():
    """Pytest imports test files by their names alone: the second one would not run."""
    names = [path.name for path in (_ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_public_names_are_those_of_the_stub():
    import jaxhet

    named: dict[str, str] = vars(jaxhet)["_MODULES"]
    assert len(named) > 20
    public = {name for name in dir(jaxhet) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(jaxhet, name), types.ModuleType)}
    assert public - modules == named.keys()
    with pytest.raises(AttributeError, match="module 'jaxhet' has no attribute 'psum'"):
        _ = jaxhet.psum  # type: ignore[attr-defined]
