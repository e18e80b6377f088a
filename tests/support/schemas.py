"""The JSON schemas of docs/reference/schemas, which real reports must keep."""

import json
from typing import Any

import jsonschema

from tests.support.jobs import ROOT


def check(name: str, report: Any) -> None:
    """Checks a report, or the text of one, against the schema of that name."""
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    value = json.loads(report) if isinstance(report, str) else report
    jsonschema.Draft202012Validator(schema).validate(value)
