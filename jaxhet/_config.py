"""The values of the options, from arguments and environment."""

import dataclasses
import difflib
import inspect
import numbers
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from jaxhet._errors import UsageError
from jaxhet._options import PREFIX, NameList, Option, Options, knob, option, table

_MOST_BYTES = 16 << 20  # largest chunk, slot and eager message
_OF_PARENT = ("program_pid", "parent_job")  # facts that a process passes on to its children


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
    """The resolved options of a process, with those that jaxhet itself and its tests set.

    Attributes:
      given: Names of the options that an argument or the environment sets.
      of_nccl: A line for each option that a variable of NCCL sets.
    """

    auto: Literal["0", "1", "join"] = option(
        "0",
        "1: jax.distributed.initialize of an unmodified program joins the job, and a program that"
        " uses a backend of JAX before it has joined fails; join: the first use of a backend, or of"
        " jax.distributed.is_initialized, joins the job; `jaxhet run` and `jaxhet launch` set it",
    )
    program_pid: int | None = option(
        None,
        "process that may join the job; Python programs that this process starts may use JAX for"
        " themselves. Set by jaxhet when the process imports JAX",
        minimum=1,
    )
    parent_job: str | None = option(
        None,
        "address of the coordinator of the job that the parent of this process has joined, so that"
        " this process can't. Set by jaxhet",
    )
    launched: bool = option(
        False,
        "somebody else runs the coordinator (`jaxhet launch`, `jaxhet coordinator`)",
    )
    cpu_devices: int | None = option(
        None,
        "virtual CPU devices of this process, where JAX uses CPUs",
        minimum=1,
    )
    partition_index: int | None = option(
        None,
        "JAX's partition (slice) of this process's devices; default: the index of its island,"
        " if there are several",
        minimum=0,
    )
    chunk_bytes: int = knob(
        512 * 1024,
        "bytes per chunk of a large message",
        minimum=4096,
        maximum=_MOST_BYTES,
        engine=True,
    )
    slot_bytes: int = knob(
        8 << 20,
        "bytes per slot of a path between two GPUs; over host and socket at most 2 MiB",
        minimum=4096,
        maximum=_MOST_BYTES,
        engine=True,
    )
    eager_bytes: int = knob(
        16 * 1024,
        "largest message that travels with its header; between GPUs of one host it uses the"
        " program's own stream",
        minimum=0,
        maximum=_MOST_BYTES,
        engine=True,
    )
    verbs_depth: int = knob(
        8,
        "RDMA chunks in flight, per peer and NIC",
        minimum=1,
        maximum=256,
        engine=True,
    )
    connect: Literal["auto", "all", "needed"] = knob(
        "auto",
        "when processes connect: all of them at the start, or two when a program needs it"
        " (needed); auto: all in jobs of up to 16 processes. GPUs that share neither memory nor a"
        " rail have device channels at the start only with `all`",
        agreed=True,
    )
    algorithm: Literal["auto", "flat", "hierarchical"] = knob(
        "auto",
        "how a collective over islands is split",
        agreed=True,
    )
    pipeline_iterations: int = knob(
        8,
        "fewest iterations of a loop whose exchanges overlap with the neighbouring iteration,"
        " on GPUs; such a loop does each exchange once more; 0: no loop",
        minimum=0,
        agreed=True,
    )
    one_world_kernels: bool | None = knob(
        None,
        "1: on GPUs, XLA compiles the kernels that one NCCL world would have, so that two"
        " GPUs, one on each island, can get the same bits; fewer exchanges overlap. Default: 1"
        " if all processes have --xla_gpu_deterministic_ops or"
        " --xla_gpu_exclude_nondeterministic_ops in XLA_FLAGS",
        agreed=True,
    )
    given: frozenset[str] = frozenset()
    of_nccl: tuple[str, ...] = ()

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats to a peer."""
        return self.peer_timeout_s / 8

    @property
    def first_deadline_s(self) -> float:
        """Longest wait of a program's first exchange for a peer that still compiles it."""
        return 6 * self.deadline_s

    @property
    def tuning_timeout_s(self) -> float:
        """Longest wait for the executable of another process with equal GPUs."""
        return 2 * self.deadline_s

    @property
    def exit_after_failure_s(self) -> float:
        """Time after which a process that ignores the job's failure is ended."""
        return self.exit_timeout_s / 10

    def filled(self, values: Mapping[str, Any]) -> Self:
        """These options, with `values` for those that were not given."""
        found = {name: value for name, value in values.items() if name not in self.given}
        return dataclasses.replace(self, **found)

    def placed(self, process_id: int, num_processes: int) -> "PlacedConfig":
        """These options, with the place in the job that the coordinator has given."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        place = {"process_id": process_id, "num_processes": num_processes}
        return PlacedConfig(**{**values, **place})

    def engine_values(self) -> dict[str, int | str]:
        """The engine's options, as `ParseOptions` in xla_plugin/engine/common/options.h needs them.

        Seconds become milliseconds (`_s`: `_ms`), names a list with commas, and None -1.
        """
        values = {o.name: getattr(self, o.name) for o in TABLE if o.engine}
        values["verbs_devices"] = NameList.parse(self.verbs_devices).nics()
        return {
            "heartbeat_ms": max(1, round(self.heartbeat_s * 1000)),
            "first_deadline_ms": round(self.first_deadline_s * 1000),
            **dict(_engine_value(o, values[o.name]) for o in TABLE if o.engine),
        }

    def agreed(self) -> dict[str, Any]:
        """The options that must have one value in the whole job."""
        return {o.name: getattr(self, o.name) for o in TABLE if o.agreed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedConfig(Config):
    """The options of a process that has joined the job."""

    process_id: int = 0
    num_processes: int = 1


TABLE = table(Config)
_BY_NAME = {o.name: o for o in TABLE}


def takes_options[**P](
    _: Callable[P, Options],
) -> Callable[[Callable[..., None]], Callable[P, None]]:
    """Gives a function the parameters of `Options`, for editors, type checkers and `help`."""

    def decorate(function: Callable[..., None]) -> Callable[P, None]:
        signature = inspect.signature(Options).replace(return_annotation=None)
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorate


def _engine_value(option: Option, value: Any) -> tuple[str, int | str]:
    name = option.name
    if name.endswith("_s"):
        return name.removesuffix("_s") + "_ms", round(value * 1000)
    match value:
        case None:
            return name, -1
        case tuple():
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
            names = ", ".join(sorted(o.name for o in table(Options)))
            raise UsageError(f"no option {name!r}; the options are {names}")
    _warn_of_unknown(environ)
    values: dict[str, Any] = {}
    of_nccl: list[str] = []
    for o in TABLE:
        if (argument := arguments.get(o.name)) is not None:
            values[o.name] = _of_argument(o, argument)
        elif (text := environ.get(o.env)) is not None:
            values[o.name] = _of_text(o, o.env, text)
        elif (text := environ.get(o.nccl, "")) not in ("", "-1"):  # -1: NCCL's "not set"
            values[o.name] = _of_text(o, o.nccl, text)
            of_nccl.append(f"{o.env} is not set: {o.nccl}={text} sets it")
    return Config(**values, given=frozenset(values), of_nccl=tuple(of_nccl))


def pass_on(name: str, value: Any) -> None:
    """Passes an option to the programs that this process starts; None: removes it for them."""
    if value is None:
        os.environ.pop(_BY_NAME[name].env, None)
    else:
        os.environ[_BY_NAME[name].env] = str(value)


def for_new_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a parent passes on: the next process is one of another job."""
    return {k: v for k, v in environ.items() if k not in [_BY_NAME[n].env for n in _OF_PARENT]}


def _of_argument(option: Option, argument: Any) -> Any:
    where = f"{option.name}={argument!r}"
    if option.is_list:
        argument = option.parse(argument) if isinstance(argument, str) else tuple(argument)
    elif isinstance(argument, numbers.Integral) and option.type in (int, float):
        argument = option.type(argument)  # NumPy's types are converted, too
    return _checked(option, argument, where)


def _of_text(option: Option, variable: str, text: str) -> Any:
    where = f"{variable}={text!r}"
    try:
        value = option.parse(text)
    except ValueError:
        kinds = {int: "a whole number", float: "a number", bool: "1, true, yes, 0, false or no"}
        kind = "a list of whole numbers" if option.is_list else kinds[option.type]
        raise UsageError(f"{where} is not {kind} ({option.help})") from None
    return _checked(option, value, where)


def _checked(option: Option, value: Any, where: str) -> Any:
    items = value if option.is_list else (value,)
    if option.aliases:
        value = items = tuple(option.aliases.get(item, item) for item in items)
    if option.is_keyed:
        keys = [item.rpartition("=")[0] for item in items]
        if len(keys) != len({*keys}):
            raise UsageError(f"{where} gives two values for one name ({option.help})")
        items = tuple(item.rpartition("=")[2] for item in items) or option.choices
    if option.choices and not (items and {*items} <= {*option.choices}):
        choices = ", ".join(option.choices)
        raise UsageError(f"{where} is not valid; {option.name} takes {choices} ({option.help})")
    if option.minimum is not None and not isinstance(value, numbers.Real):
        raise UsageError(f"{where} is not a number ({option.help})")
    if option.minimum is not None and not float(value) >= option.minimum:  # NaN, too
        raise UsageError(f"{where} is below the minimum, {option.minimum:g} ({option.help})")
    if option.maximum is not None and float(value) > option.maximum:
        raise UsageError(f"{where} is above the maximum, {option.maximum:.0f} ({option.help})")
    return value


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {o.env.removeprefix(PREFIX) for o in TABLE}
    for name in environ:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            warnings.warn(
                f"unknown environment variable {name}{hint}", stacklevel=1
            )  # one place: said once
