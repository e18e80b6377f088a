"""Benchmarks say which commit their figures are of."""

import datetime
import pathlib
import re
import subprocess

from benchmarks import tables

_ROOT = pathlib.Path(__file__).parents[2]
_PRINTS_A_TABLE = re.compile(r"print\(f?\"?[^\n]*\b(table|show)\(|\bTable\(title=")
# The caller of the first prints it; the demo's table is for newcomers, not for documents.
_PARTS = {"ladder_report.py", "demo.py"}


def test_every_table_has_its_commit() -> None:
    programs = {
        path.name: path.read_text()
        for path in (_ROOT / "benchmarks").glob("*.py")
        if _PRINTS_A_TABLE.search(path.read_text()) and path.name not in _PARTS
    }
    assert len(programs) > 5
    assert not [name for name, text in programs.items() if "made_at()" not in text]


def test_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = re.match(r"Made at commit (\w{9})( with changes)? on (\S+);", tables.made_at())
    assert found
    assert head.startswith(found[1])
    assert found[3] == str(datetime.datetime.now(datetime.UTC).date())
