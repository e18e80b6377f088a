"""The values of the options, from arguments and environment."""

import difflib
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._options import OPTIONS, PREFIX, Option, flag

_OF_PARENT = ("program_pid", "parent_job")  # facts that a process passes on to its children
_BY_NAME = {option.name: option for option in OPTIONS}


class Config:
    """The resolved options of a process; attribute access by option name."""

    def __init__(self, values: Mapping[str, Any], given: Iterable[str] = ()):
        self._values = dict(values)
        self.given = frozenset(given)  # options that an argument or the environment sets

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def filled(self, values: Mapping[str, Any]) -> "Config":
        """These options, with `values` for those that were not given."""
        found = {name: value for name, value in values.items() if name not in self.given}
        return Config({**self._values, **found}, self.given)

    def placed(self, process_id: int, num_processes: int) -> "Config":
        """These options, with the place in the job that the coordinator has given."""
        place = {"process_id": process_id, "num_processes": num_processes}
        return Config({**self._values, **place}, self.given)

    def engine_values(self) -> dict[str, int | str]:
        """The engine's options, as `ParseOptions` in xla_plugin/engine/options.h needs them.

        Seconds become milliseconds (`_s`: `_ms`), names a list with commas, and None -1.
        """
        return dict(_engine_value(o.name, self._values[o.name]) for o in OPTIONS if o.engine)

    def agreed(self) -> dict[str, Any]:
        """The options that must have one value in the whole job."""
        return {o.name: self._values[o.name] for o in OPTIONS if o.agreed}


def _engine_value(name: str, value: Any) -> tuple[str, int | str]:
    if name.endswith("_s"):
        return name.removesuffix("_s") + "_ms", round(value * 1000)
    match value:
        case None:
            return name, -1
        case tuple() | list():
            return name, ",".join(value)
        case str():
            return name, value
    return name, int(value)


def resolve(
    arguments: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """Resolves every option: argument, then environment, then default.

    Raises:
      UsageError: a value is not valid; the text lists what is.
    """
    arguments = arguments or {}
    for name in arguments:
        if name not in _BY_NAME:
            raise UsageError(f"no option {name!r}; the options are {', '.join(sorted(_BY_NAME))}")
    _warn_of_unknown(environ)
    given = {o.name for o in OPTIONS if arguments.get(o.name) is not None or o.env in environ}
    values = {o.name: _resolve_one(o, arguments.get(o.name), environ) for o in OPTIONS}
    return Config(values, given)


def pass_on(name: str, value: Any) -> None:
    """Gives an option to the programs that this process starts; None: takes it from them."""
    if value is None:
        os.environ.pop(_BY_NAME[name].env, None)
    else:
        os.environ[_BY_NAME[name].env] = str(value)


def for_new_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a parent passes on: the next process is one of another job."""
    return {k: v for k, v in environ.items() if k not in [_BY_NAME[n].env for n in _OF_PARENT]}


def _resolve_one(option: Option, argument: Any, environ: Mapping[str, str]) -> Any:
    if argument is not None:
        if isinstance(argument, numbers.Integral) and option.type in (int, float):
            argument = option.type(argument)  # NumPy's types are converted, too
        return _checked(option, argument, f"{option.name}={argument!r}")
    text = environ.get(option.env)
    if text is None:
        return option.default
    where = f"{option.env}={text!r}"
    try:
        value = option.type(text)
    except ValueError:
        kinds = {int: "a whole number", float: "a number", flag: "1, true, yes, 0, false or no"}
        kind = kinds.get(option.type, "a value of this option")
        raise UsageError(f"{where} is not {kind} ({option.help})") from None
    return _checked(option, value, where)


def _checked(option: Option, value: Any, where: str) -> Any:
    if option.minimum is not None and not isinstance(value, numbers.Real):
        raise UsageError(f"{where} is not a number ({option.help})")
    if option.choices and not _is_of(option.choices, value):
        choices = ", ".join(option.choices)
        raise UsageError(f"{where} is not valid; {option.name} takes {choices} ({option.help})")
    if option.minimum is not None and not float(value) >= option.minimum:  # NaN, too
        raise UsageError(f"{where} is below the minimum, {option.minimum:g} ({option.help})")
    if option.maximum is not None and float(value) > option.maximum:
        raise UsageError(f"{where} is above the maximum, {option.maximum:.0f} ({option.help})")
    return value


def _is_of(choices: tuple[str, ...], value: Any) -> bool:
    """Whether `value` is a choice, or a sequence of at least one."""
    parts = (value,) if isinstance(value, str) else tuple(value)
    return bool(parts) and all(part in choices for part in parts)


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {o.env.removeprefix(PREFIX) for o in OPTIONS}
    for name in environ:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            warnings.warn(
                f"unknown environment variable {name}{hint}", stacklevel=1
            )  # one place: said once
