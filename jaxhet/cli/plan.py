"""`jaxhet plan`: what a program exchanges, before there is a job."""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._jax.jaxlib import Vendor

# Speed of a device's matrix products in 1e12 operations per second. Trained models reached 40 % of
# an H100's bf16 peak. The value for an MI350X is the same share; the one for CPUs is a guess.
_TFLOP_PER_S: dict[Vendor, float] = {"cuda": 400, "rocm": 900, "cpu": 0.1}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet plan`; `jaxhet plan --help` explains each."""

    vendor: Vendor = "cpu"
    islands: int = 2
    devices: int = 1  # devices of each island
    link_gb_per_s: float | None = None
    latency_us: float = 0.0
    tflop_per_s: float | None = None
    json: bool = False


def plan(target: str, options: Options) -> str:
    """The report of the program that `target` gives, as text.

    Only once in a process, and before JAX has a backend.

    Raises:
      UsageError: there is no such target, it gives no program, or the program can't run over
        islands.
    """
    if options.latency_us and options.link_gb_per_s is None:
        raise UsageError("--latency-us is of use with --link-gb-per-s only; give both")
    from jaxhet import _plan
    from jaxhet._pretended import deviceless  # and with them JAX

    plan_of = deviceless.pretend(options.vendor, options.islands, options.devices)
    jitted, args = _program(target, _load(target)())
    report, costs = plan_of(_plan.to_stage(jitted, args, {}))
    time, advice = None, ""
    if options.link_gb_per_s is not None:
        time = report.seconds(options.link_gb_per_s, options.latency_us)
        rate = options.tflop_per_s or _TFLOP_PER_S[options.vendor]
        advice = report.advice(costs, time, rate)
    return report.to_json(time, advice) + "\n" if options.json else report.text(time) + advice


def _load(target: str) -> Callable[[], Any]:
    """The function of `file.py:function` or `module:function`."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise UsageError(f"{target!r} names no function; give file.py:function or module:function")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{source} has no function {name!r}")
    return function


def _load_file(source: str) -> ModuleType:
    path = pathlib.Path(source).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {source}")
    sys.path.insert(0, str(path.parent))  # Python does the same for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _load_module(source: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"there is no module {source}; a file's name ends in .py") from None


def _program(target: str, given: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jitted function and its arguments, or a lowered program and none."""
    from jaxhet._plan import is_stage

    match given:
        case (jitted, tuple() | list() as args):
            return jitted, tuple(args)
        case _ if is_stage(given):
            return given, ()
    raise UsageError(
        f"{target} returned {type(given).__name__}; it must return (jitted, args), a jitted"
        " function and a tuple of its arguments, or what jitted.lower(...) gives"
    )
