"""JSON schemas of the reports of jaxhet, from the dataclasses that they are made of.

`tools/reference.py` writes them to docs/reference/schemas; tests compare real reports with them.
"""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

from jaxhet import _plan
from jaxhet._doctor.report import Report
from jaxhet._job.proofs import Qualification

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def schemas() -> dict[str, dict[str, Any]]:
    """Schema of each report by its name."""
    return {
        "doctor": _schema("jaxhet doctor --json", Report),
        "qualify": _schema("jaxhet-qualify.json, of jaxhet doctor --qualify", Qualification),
        "plan": _plan_schema(),
        "stats": _stats_schema(),
    }


def text(schema: dict[str, Any]) -> str:
    """The content of a schema's file."""
    return json.dumps(schema, indent=2) + "\n"


def _schema(title: str, cls: type, **further: str) -> dict[str, Any]:
    """The schema of `dataclasses.asdict` of an instance, with `further` fields and their types."""
    definitions: dict[str, Any] = {}
    own = _object(cls, definitions)
    for name, kind in further.items():
        own["properties"][name] = {"type": kind}
        own["required"].append(name)
    return {"$schema": _DRAFT, "title": title, **own, "$defs": definitions}


def _plan_schema() -> dict[str, Any]:
    counts = {"exchanges_per_step": "integer", "bytes_per_step": "integer", "is_exact": "boolean"}
    return _schema("jaxhet plan --json", _plan.PlanReport, **counts)


def _stats_schema() -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    counts = ["exchanges_started", "exchanges_completed"]
    return {
        "$schema": _DRAFT,
        "title": "jaxhet.stats() of a job of several islands",
        "type": "object",
        "properties": {
            "exchange_seconds": {"type": "number", "minimum": 0},
            **dict.fromkeys(counts, count),
        },
        "patternProperties": {"^bytes_": count},
        "additionalProperties": False,
        "required": ["exchange_seconds", *counts],
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return {
        "type": "object",
        "description": (cls.__doc__ or "").partition("\n")[0],
        "properties": {name: _of(kinds[name], definitions) for name in names},
        "additionalProperties": False,
        "required": names,
    }


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type of a field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if dataclasses.is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(typing.cast(type, kind), definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(argument, definitions) for argument in arguments]}
    if origin is list or arguments[1:] == (Ellipsis,):
        return {"type": "array", "items": _of(arguments[0], definitions)}
    assert origin is tuple, f"no schema for {kind}"
    items = [_of(argument, definitions) for argument in arguments]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
