"""jaxhet: one JAX program over islands of several vendors.

A name is imported when it is first used: launcher and coordinator do without JAX, whose import
takes a second.
"""

import importlib
import pathlib
import re

_STUB = pathlib.Path(__file__).with_suffix(".pyi").read_text()
_MODULES = {
    name: module
    for module, name in re.findall(r"^from (\S+) import \S+ as (\S+)$", _STUB, re.MULTILINE)
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
