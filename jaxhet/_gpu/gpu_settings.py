"""Settings of XLA and JAX before they start GPUs in a job of several islands."""

import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from jaxhet._errors import UsageError
from jaxhet._jax import compat, compiler_settings
from jaxhet._vendors import BY_PLATFORM
from jaxhet.compiler import GPU_COMPILER_OPTIONS

_ABORTS = "with an exchange in the program, XLA's compiler would abort the process"


class RefusedFlag(NamedTuple):
    """A flag of XLA that jobs refuse: a test of its value, and the reason."""

    applies: Callable[[str], bool]
    why: str


REFUSED: dict[str, RefusedFlag] = {
    "xla_gpu_shard_autotuning": RefusedFlag(
        compiler_settings.is_on,
        "the process that compiles for others would wait for what they tune",
    ),
    "xla_gpu_enable_pipelined_p2p": RefusedFlag(compiler_settings.is_on, _ABORTS),
    "xla_gpu_experimental_pipeline_parallelism_opt_level": RefusedFlag(
        lambda value: value not in ("0", "PIPELINE_PARALLELISM_OPT_LEVEL_DISABLE"), _ABORTS
    ),
    "xla_gpu_disable_async_collectives": RefusedFlag(
        bool, "nothing would be computed while collectives and exchanges run"
    ),
}

# A flag that several islands need. The user's own value stays, unless it is refused.
_NEEDED: dict[str, bool | int] = {"xla_gpu_shard_autotuning": False}
# Flags with which users control the tuning of kernels, beside a level of 0.
_TUNING = (
    "xla_gpu_per_fusion_autotune_cache_dir",
    "xla_gpu_dump_autotune_results_to",
    "xla_gpu_load_autotune_results_from",
)

# A GPU has seven streams of jaxhet, and XLA's streams for kernels, copies and NCCL or RCCL. With 8
# queues a job got stuck that had two GPUs in each process, and NICs in software.
_FEWEST_QUEUES = 16


def prepare(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Completes XLA_FLAGS. Called when the job is known to have islands, before a backend exists.

    Returns:
      Whether processes with equal GPUs share programs: not if the user controls tuning.

    Raises:
      UsageError: A setting of JAX or XLA would stop the job or its process.
    """
    compat.refuse_shared_programs()
    given = compiler_settings.xla_flags_text(environ)
    environ["XLA_FLAGS"] = complete(given)
    return not user_controls_tuning(compiler_settings.parse_flags(given))


def user_controls_tuning(flags: Mapping[str, str]) -> bool:
    """Whether the user controls the tuning of kernels, by flags of XLA. Pure."""
    return flags.get("xla_gpu_autotune_level") == "0" or any(name in flags for name in _TUNING)


def give_queues_to_streams(platform: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Makes the driver give each stream a hardware queue, unless the user chose a number.

    Streams that share a queue wait for each other. A stream that sends may wait for the peer.
    Work in the same queue waits too, even if the peer needs it. Call this before anything loads
    the driver.

    Args:
      platform: The process's GPU platform.
      environ: The environment.

    Returns:
      A line for the log: the variable that was set, and why; or empty, if it was set before.
    """
    vendor = BY_PLATFORM[platform]
    name, given = vendor.queues, environ.get(vendor.queues)
    if given is None:
        environ[name] = str(vendor.num_queues)
        return (
            f"{name}={vendor.num_queues} was set: streams of exchanges do not share the driver's"
            " hardware queues, in which they would wait for each other"
        )
    if given.isdecimal() and int(given) < _FEWEST_QUEUES:
        warnings.warn(
            f"{name}={given}: streams that share a hardware queue of the driver wait for each"
            " other, and exchanges over host, socket or verbs can get stuck until the deadline;"
            " leave it unset",
            stacklevel=2,
        )
    return ""


def over_islands(text: str) -> dict[str, bool | int]:
    """XLA's options for programs over several islands, without those in the user's flags `text`.

    Programs inside an island are compiled as without jaxhet. Pure.
    """
    given = compiler_settings.parse_flags(text)
    return {name: value for name, value in GPU_COMPILER_OPTIONS.items() if name not in given}


def added(given: str, completed: str) -> str:
    """One line for the log: what was added to the user's flags, and why. Pure."""
    flags = completed.removeprefix(given).strip()
    options = " ".join(_flag(*each) for each in over_islands(given).items())
    return (
        f"added to XLA_FLAGS: {flags or 'nothing'}; to programs over islands:"
        f" {options or 'nothing'} (exchanges overlap with compute)"
    )


def complete(text: str) -> str:
    """The flags of `text`, with those that jaxhet needs. Pure.

    Raises:
      UsageError: one of them is refused.
    """
    given = compiler_settings.parse_flags(text)
    for name, refusal in REFUSED.items():
        if name in given and refusal.applies(given[name]):
            raise UsageError(
                f"XLA_FLAGS has --{name}={given[name]}: {refusal.why}; remove it in a job of"
                " several islands"
            )
    missing = [_flag(name, value) for name, value in _NEEDED.items() if name not in given]
    return " ".join([text, *missing]).strip()


def _flag(name: str, value: bool | int) -> str:
    return f"--{name}={str(value).lower()}"
