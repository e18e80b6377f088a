"""Dataclasses out of JSON: the inverse of `dataclasses.asdict` and `json.dumps`."""

import contextlib
import dataclasses
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

_MOST_SHOWN = 200  # characters of a value in an error


def decode(kind: Any, value: Any, what: str) -> Any:
    """The value of a type, which may be a dataclass, a container of values, or a union.

    Args:
      kind: The type.
      value: The value as JSON has it; lists become tuples where the type says so.
      what: Name of the value in errors.

    Raises:
      ValueError: The value has another type, or a dataclass lacks a field or has an unknown one.
    """
    parts, origin = get_args(kind), get_origin(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = ", ".join(hints)
        if not isinstance(value, dict):
            raise ValueError(f"{what} is {value!r:.{_MOST_SHOWN}}; its fields should be {fields}")
        for wrong, names in (
            ("lacks", [name for name in hints if name in _required(kind) - value.keys()]),
            ("has unknown", [repr(name)[:_MOST_SHOWN] for name in value if name not in hints]),
        ):
            if names:
                raise ValueError(f"{what} {wrong} {', '.join(names)}; its fields are {fields}")
        found = {name: decode(hints[name], one, f"{name} of {what}") for name, one in value.items()}
        return kind(**found)  # pyright: ignore[reportCallIssue]
    if origin is types.UnionType:
        for part in parts:
            with contextlib.suppress(ValueError):
                return decode(part, value, what)
    elif origin is dict and isinstance(value, dict):
        return {key: decode(parts[1], one, what) for key, one in value.items()}
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        is_long = origin is list or parts[1:] == (Ellipsis,)
        each = parts[:1] * len(value) if is_long else parts
        if len(each) == len(value):
            pairs = enumerate(zip(each, value, strict=True))
            return origin(decode(of, one, f"entry {i} of {what}") for i, (of, one) in pairs)
    elif kind is Any or type(value) is kind or (origin is Literal and value in parts):
        return value
    name = kind.__name__ if isinstance(kind, type) else kind
    raise ValueError(f"{what} is {value!r:.{_MOST_SHOWN}}, which is no {name}")


def _required(kind: Any) -> set[str]:
    """Names of the fields without a default."""
    missing = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    }
