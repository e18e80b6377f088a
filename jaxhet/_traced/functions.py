"""Python functions in words, for programs that call them: what they say, and what they hold."""

import functools
import hashlib
import inspect
import numbers
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

_PLAIN = (numbers.Number, str, bytes, np.ndarray, np.generic, jax.Array, type(None))
_PLACES = (jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding)
_NAMED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    np.ufunc,
)
_DIGEST_BYTES = 8


def function_text(function: Callable[..., Any], plain_text: Callable[[Any], str]) -> str:
    """A function in words that are equal where it computes the same from the same operands.

    That is its source, where it is written, and the values of what it reads: defaults, cells,
    globals that are plain data, functions of its own module, attributes of its object.

    Args:
      function: Any callable.
      plain_text: Gives a number, string or array in words.
    """
    return _Describer(plain_text).text(function)


class _Describer:
    def __init__(self, plain_text: Callable[[Any], str]):
        self._plain_text = plain_text
        self._seen: dict[int, Any] = {}  # by identity; keeps what it names alive

    def text(self, value: Any) -> str:
        """A value in words; one that was met before is named by its number."""
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return self.text(value.tolist())  # the bytes are addresses
        if isinstance(value, jax.Device):  # each island has others
            return "a device"
        if isinstance(value, (*_PLAIN, *_PLACES)):
            return self._plain_text(value)
        if isinstance(value, _NAMED):
            return f"{type(value).__name__} {getattr(value, '__qualname__', '') or value.__name__}"
        if id(value) in self._seen:
            return f"value {list(self._seen).index(id(value))}"
        self._seen[id(value)] = value
        return self._compound_text(value)

    def _compound_text(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return self._function_text(value)
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial{self.text((value.func, value.args, value.keywords))}"
        if isinstance(value, dict):
            return (
                "{" + ", ".join(f"{self.text(k)}: {self.text(v)}" for k, v in value.items()) + "}"
            )
        if isinstance(value, set | frozenset):
            return "{" + ", ".join(sorted(map(self.text, value))) + "}"
        if isinstance(value, tuple | list):
            return "(" + ", ".join(map(self.text, value)) + ")"
        return self._object_text(value)

    def _object_text(self, value: Any) -> str:
        words = [f"{type(value).__module__}.{type(value).__qualname__}"]
        if callable(value):
            words.append(self.text(type(value).__call__))
        names = [*getattr(value, "__dict__", ()), *_slots(type(value))]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return " ".join([*words, self.text(held)]) if held else " ".join(words)

    def _function_text(self, function: types.FunctionType) -> str:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: _content(cell) for name, cell in cells}
        read = {
            name: function.__globals__[name]
            for name in sorted(set(_names(function.__code__)))
            if name in function.__globals__
        }
        held |= {n: v for n, v in read.items() if self._counts(v, function)}
        defaults = (function.__defaults__, function.__kwdefaults__)
        words = [f"{function.__module__}.{function.__qualname__}", _code_text(function.__code__)]
        words += [self.text(part) for part in (defaults, held) if any(part)]
        return " ".join(words)

    def _counts(self, value: Any, function: types.FunctionType) -> bool:
        if isinstance(value, types.FunctionType):
            return value.__globals__ is function.__globals__
        return isinstance(value, _PLAIN)


def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]


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


def _code_text(code: types.CodeType) -> str:
    """Where a function is written, and a digest of its source, or of its code where there is none.

    The source is the same under all versions of Python.
    """
    columns = [
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) != (code.co_firstlineno, 0)
    ]
    line, column = min(columns, default=(code.co_firstlineno, 0))
    where = f"{pathlib.PurePath(code.co_filename).name}:{line}:{column}"
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        source = repr(tuple(_code_words(code)))
    return f"{where} {hashlib.blake2b(source.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"


def _code_words(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _code_words(const)
        else:
            yield repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
