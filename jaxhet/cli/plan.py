"""`jaxhet plan`: what a program exchanges, before there is a job."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import typer

from jaxhet._errors import UsageError
from jaxhet._jax.jaxlib import Vendor


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="function that returns the program",
        ),
    ],
    vendor: Annotated[
        Vendor, typer.Option(help="compiler: cuda for H100s, rocm for MI350Xs, or cpu")
    ] = "cpu",
    islands: Annotated[int, typer.Option(min=1, help="number of islands")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="devices of each island")] = 1,
    json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Print a program's exchanges over islands, without a job and without GPUs.

    FUNCTION is called without arguments and returns (jitted, args), or the result of
    jitted.lower(...). jaxhet.make_mesh returns the devices of a pretended job, on which nothing can
    run; arguments are jax.ShapeDtypeStructs with shardings. jaxhet.initialize does nothing there.
    Options of the compiler are read from JAXHET_*.
    """
    from jaxhet import _plan
    from jaxhet._pretended import deviceless  # imports JAX

    plan_of = deviceless.pretend(vendor, islands, devices)
    jitted, args = _program(target, _load(target)())
    report = plan_of(_plan.to_stage(jitted, args, {}))
    print(report.to_json() if json else report.text(), end="\n" if json else "")


def _load(target: str) -> Callable[[], Any]:
    """The function of `file.py:function`."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise UsageError(f"{target!r} names no function; give file.py:function")
    function = getattr(_load_file(source), name, None)
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
