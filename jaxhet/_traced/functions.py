"""Descriptions of Python functions and classes, and the check whether a library has them."""

import csv
import dis
import functools
import hashlib
import inspect
import pathlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_DIGEST_BYTES = 8

# Attributes of a class that do not affect computations.
_NOT_READ = frozenset(
    (
        "__abstractmethods__",
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__type_params__",
        "__slotnames__",  # kept by pickle
        "__weakref__",
        "_abc_impl",
    )
)
_DESCRIPTORS_OF_C = (types.MemberDescriptorType, types.GetSetDescriptorType)


def digest(data: str | bytes) -> str:
    """A digest of a text or of bytes, in hexadecimal."""
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def is_of_library(value: Any) -> bool:
    """Whether a function or class of an installed library is found by its own name.

    Libraries are equal in all processes, so the name identifies it.
    """
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    if found is None or not _is_library(found):
        return False
    for name in str(getattr(value, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is value


@functools.cache
def _is_library(module: types.ModuleType) -> bool:
    """Whether a module is installed, rather than a part of the user's program."""
    package = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(module, "__file__", None) or getattr(package, "__file__", None)
    if file is None:
        return package.__name__ in sys.stdlib_module_names
    return package.__name__ != "__main__" and _is_library_file(file)


@functools.cache
def _library_folders() -> tuple[pathlib.Path, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    own = pathlib.Path(__file__).parents[1]
    packages = [pathlib.Path(str(module.__file__)).parent for module in (jax, np)]
    return tuple(path.resolve() for path in (own, *packages, *map(pathlib.Path, paths)))


@functools.cache
def _is_library_file(file: str) -> bool:
    path = pathlib.Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in _library_folders()) or any(
        path in _installed_files(folder) for folder in {*map(pathlib.Path, sys.path)}
    )


@functools.cache
def _installed_files(folder: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of packages in a folder of Python's path, such as one of `pip install --target`."""
    if folder.resolve() in _library_folders():
        return frozenset()  # all that is there is installed
    return frozenset(
        (folder / name).resolve()
        for record in folder.glob("*.dist-info/RECORD")
        for name, *_ in csv.reader(record.read_text("utf-8").splitlines())
    )


def own_attributes(cls: type) -> dict[str, Any]:
    """The methods and values that a class itself defines for its instances, by name."""
    return {
        name: value
        for name, value in sorted(vars(cls).items())
        if name not in _NOT_READ
        and not isinstance(value, _DESCRIPTORS_OF_C)
        and not _is_generated(value, cls)
    }


def _is_generated(value: Any, cls: type) -> bool:
    """Whether `dataclasses` or `collections` generated a method from the fields of its class."""
    if vars(cls).keys().isdisjoint(("__dataclass_fields__", "_fields")):
        return False
    code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
    return code is not None and code.co_filename.startswith("<string>")


def attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object holds itself, in its dictionary and its slots, by name.

    Omits results that the object caches: cached properties, and hashes, which differ between
    processes.
    """
    held = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)):
        try:
            held[name] = slot.__get__(value)
        except AttributeError:  # it is empty
            continue
    return {name: part for name, part in sorted(held.items()) if not _is_kept(value, name, part)}


def _is_kept(value: Any, name: str, part: Any) -> bool:
    of_class = (vars(base).get(name) for base in type(value).__mro__)
    is_cached = any(isinstance(found, functools.cached_property) for found in of_class)
    return is_cached or (name.endswith("hash") and type(part) is int)


def _slots(cls: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """The slots of instances by name, except slots in which C keeps an address."""
    for base in cls.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and not name.endswith("offset__"):
                yield name, slot


def is_all_in_attributes(cls: type) -> bool:
    """Whether instances hold attributes only; instances of a class in C may hold more."""
    count = sum(1 for _ in _slots(cls))
    count += (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return not cls.__itemsize__ and cls.__basicsize__ <= object.__basicsize__ + 8 * count


def read_by(function: types.FunctionType) -> dict[str, Any]:
    """Cells and globals that a function reads, by name.

    Globals of a library's function are left out.
    """
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = {name: _content(cell) for name, cell in cells}
    if not _is_library_file(code.co_filename):
        held = {**function.__globals__, **held}
    return _read_of(held, sorted({*_names(code), *code.co_freevars}), set())


def _read_of(held: dict[str, Any], names: list[str], met: set[str]) -> dict[str, Any]:
    """The values of these names in `held`; a module of the program is read in the same way."""
    found: dict[str, Any] = {}
    for name in names:
        value = held.get(name)
        if not isinstance(value, types.ModuleType):
            found |= {name: value} if name in held else {}
        elif not _is_library(value) and value.__name__ not in met:
            met.add(value.__name__)
            read = _read_of(vars(value), names, met)
            found |= {f"{name}.{key}": part for key, part in read.items()}
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def only_raises(function: Any) -> bool:
    """Whether a Python function can only raise: no instruction of its code returns or yields."""
    if not isinstance(function, types.FunctionType):
        return False
    names = (instruction.opname for instruction in dis.get_instructions(function))
    return not any(name.startswith(("RETURN_", "YIELD_")) for name in names)


def code_text(code: types.CodeType) -> str:
    """Place of a function, and a digest of its source (of its code if there is no source).

    The source is the same under all versions of Python.
    """
    return _code_text(code, code.co_filename)


@functools.lru_cache(maxsize=4096)
def _code_text(code: types.CodeType, file: str) -> str:
    columns = [
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) != (code.co_firstlineno, 0)
    ]
    line, column = min(columns, default=(code.co_firstlineno, 0))
    where = f"{pathlib.PurePath(file).name}:{line}:{column}"
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        source = repr(tuple(_code_words(code)))
    return f"{where} {digest(source)}"


def _code_words(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _code_words(const)
        else:
            yield repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
