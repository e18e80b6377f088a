"""Checks of traces in the Trace Event Format: every viewer must be able to show all events."""

import itertools
from typing import Any

import jsonschema

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: JSON Object
# Format; of its events, metadata and complete ones.
_OWN = {"type": "integer", "minimum": 0}
_SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "args"],
                "properties": {"name": {"type": "string", "minLength": 1}, "pid": _OWN},
                "oneOf": [
                    {
                        "required": ["tid", "ts", "dur"],
                        "properties": {
                            "ph": {"const": "X"},
                            "tid": _OWN,
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "cat": {"type": "string"},
                        },
                    },
                    {
                        "required": ["tid"],
                        "properties": {"ph": {"const": "M"}, "name": {"const": "thread_name"}},
                    },
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "process_sort_index"]},
                        },
                    },
                ],
            },
        },
    },
}


def check(trace: dict[str, Any]) -> None:
    """Checks the form; that each row has a name; and that its events follow one another."""
    jsonschema.validate(trace, _SCHEMA)
    events = trace["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in complete(trace):
        row = rows.setdefault((event["pid"], event["tid"]), [])
        row.append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == rows.keys()
    assert {pid for pid, _ in rows} <= {e["pid"] for e in events if e["name"] == "process_name"}
    for times in rows.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(times)):
            assert end <= start + 1e-3  # rounded to nanoseconds


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that have a duration."""
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]
