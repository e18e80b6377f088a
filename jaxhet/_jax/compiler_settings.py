"""Settings that change numbers or programs: flags of XLA_FLAGS, and values of JAX's config.

Each process sends its settings to the coordinator, which compares them
(`jaxhet/_job/coordinator.py`).
"""

import enum
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

XLA_FLAGS = "XLA_FLAGS"

# Flags of XLA that are not compared: a pattern of the whole name, and the reason.
NOT_COMPARED: dict[str, str] = {
    r"xla_(\w+_)?dump_\w+": "Dumps are for a reader; each process may write its own.",
    r"xla_\w+_(cache_dir|cache_file|data_dir)": "Each host has its own paths.",
    r"xla_force_host_platform_device_count": "Processes may have different numbers of devices.",
    r"xla_\w+_timeout(_seconds)?": "The length of a wait changes no result.",
    r"xla_\w+_(logging|stats)(_\w+)?": "Logs are for a reader.",
    r"xla_hlo_profile|xla_\w+_(traceme|trace_annotation|trace_events)(_\w+)?": (
        "Profiles are for a reader."
    ),
}

_DETERMINISTIC = (
    f"{XLA_FLAGS} --xla_gpu_deterministic_ops",
    f"{XLA_FLAGS} --xla_gpu_exclude_nondeterministic_ops",
)

# Values of JAX's config that change a jaxpr, its lowering or the compiled program. A value that
# only makes JAX raise or warn is not here. A name that the installed JAX does not have is skipped.
JAX_CONFIG = (
    # types and arithmetic
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_softmax_custom_jvp",
    "jax_use_hlo_logistic_lowering",
    # random numbers
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    # checks that are computed by the program, or that run it again without jit
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_disable_jit",
    "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_oob",
    "jax_experimental_unsafe_xla_runtime_errors",
    # traces and derivatives
    "eager_constant_folding",
    "jax_custom_jvp3",
    "jax_custom_vjp3",
    "jax_embedded_constants_max_bytes",
    "jax_remat3",
    "jax_remat_barrier_no_cotangents",
    "jax_scan3",
    "jax_use_direct_linearize",
    "jax_use_simplified_jaxpr_constants",
    # devices and sharding
    "jax_auto_pcast",
    "jax_remove_size_one_mesh_axis_from_type",
    "jax_sort_devices_by_process_index",
    "jax_use_rgv3",
    "jax_use_shardy_partitioner",
    # kernels
    "jax_bcoo_cusparse_lowering",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_poison_buffers",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_use_emit_pipeline_primitive",
    "jax_use_magma",
    # XLA's compiler
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_enable_pgle",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_pgle_aggregation_percentile",
    "jax_pgle_profiling_runs",
    "jax_xla_profile_version",
)

_FLAG = re.compile(
    r"""\s*--?(?P<name>[^\s=]*)"""
    r"""(?:="(?P<double>(?:\\.|[^"\\])*)"?|='(?P<single>[^']*)'?|=(?P<plain>\S*))?""",
    re.DOTALL,
)


class Difference(NamedTuple):
    """A setting that differs between two processes, with both values as a message shows them."""

    name: str
    ours: str
    theirs: str


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns this process's settings by name, such as "XLA_FLAGS --xla_cpu_max_isa"."""
    flags = {
        f"{XLA_FLAGS} --{name}": value
        for name, value in xla_flags(environ).items()
        if not any(re.fullmatch(pattern, name) for pattern in NOT_COMPARED)
    }
    import jax  # the launcher, which imports this module too, does without it

    values = jax.config.values
    return {**flags, **{name: _text(values[name]) for name in JAX_CONFIG if name in values}}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """Returns the settings that differ, sorted by name. Pure."""
    return [
        Difference(name, _shown(ours.get(name)), _shown(theirs.get(name)))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def xla_flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the flags that XLA_FLAGS gives, name -> value."""
    return parse_flags(xla_flags_text(environ))


def are_kernels_deterministic(settings: Mapping[str, str]) -> bool:
    """Returns whether settings ask for GPU kernels that give the same bits in every run. Pure."""
    return any(is_on(settings[name]) for name in _DETERMINISTIC if name in settings)


def is_on(value: str) -> bool:
    """Returns whether XLA reads the value of a boolean flag as true. Pure."""
    return value.lower() in ("", "1", "t", "true", "y", "yes")


def xla_flags_text(environ: Mapping[str, str]) -> str:
    """Returns the flags that XLA_FLAGS gives, as text.

    As in XLA, a value that does not begin with "-" is the path of a file that holds the flags.
    """
    text = environ.get(XLA_FLAGS, "").strip()
    if text and not text.startswith("-"):
        file = pathlib.Path(text)
        return file.read_text().strip() if file.is_file() else ""
    return text


def parse_flags(text: str) -> dict[str, str]:
    """Returns names and values of the flags in `text`. Pure.

    As in XLA, the last value of a name counts, a value may be quoted, a flag without a value is
    "true", and a word that does not begin with "-" ends the flags.
    """
    flags: dict[str, str] = {}
    position = 0
    while match := _FLAG.match(text, position):
        flags[match["name"]] = _value(match)
        position = match.end()
    return flags


def _value(match: re.Match[str]) -> str:
    if match["double"] is not None:
        return re.sub(r"\\(.)", r"\1", match["double"], flags=re.DOTALL)
    return next((v for v in (match["single"], match["plain"]) if v is not None), "true")


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if value and value.isprintable() else repr(value)


def _text(value: Any) -> str:
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)
