"""Settings that change numbers or programs: flags of XLA_FLAGS, and values of JAX's config.

Each process sends its settings to the coordinator, which compares them
(`jaxhet/_job/coordinator.py`).
"""

import enum
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
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

# JAX itself lists the settings that change a trace, a lowering or a compiled program, for the keys
# of its caches. They are all compared, except these.
_ONLY_CHECKS = "It makes JAX raise or warn, and changes no program."
_IN_THE_JAXPR = "Types, shardings and parameters of the jaxpr show it."
NOT_COMPARED_CONFIG: dict[str, str] = {
    "abstract_mesh_context_manager": _IN_THE_JAXPR,
    "axis_env_state": _IN_THE_JAXPR,
    "compute_on_context_manager": "Each equation has its own, which is compared.",
    "jax_check_static_indices": _ONLY_CHECKS,
    "jax_debug_key_reuse": _ONLY_CHECKS,
    "jax_default_device": "Each process has its own devices.",
    "jax_hlo_source_file_canonicalization_regex": "Each host has its own paths.",
    "jax_mutable_array_checks": _ONLY_CHECKS,
    "jax_no_collectives": _ONLY_CHECKS,
    "jax_no_execution": _ONLY_CHECKS,
    "jax_numpy_rank_promotion": _ONLY_CHECKS,
    "jax_raise_on_ppermute_sort_diff": _ONLY_CHECKS,
    "layout_tracing_mode": _IN_THE_JAXPR,
    "mesh_context_manager": _IN_THE_JAXPR,
    "pallas_tpu_interpret_mode_context_manager": "It is for TPUs.",
    "user_context": "It is for the user's own caches; jaxhet has one for each thread.",
    "xla_metadata_context_manager": "Each equation has its own, which is compared.",
}

# Settings that choose kernels or profiles of one vendor. They are compared as all others are, but
# islands that differ in them may exchange data.
OWN_CONFIG = frozenset(
    (
        "jax_enable_pgle",
        "jax_memory_fitting_level",
        "jax_optimization_level",
        "jax_pgle_profiling_runs",
        "jax_ragged_dot_use_gpu_pallas_triton_lowering",
        "jax_threefry_gpu_kernel_lowering",
        "jax_xla_profile_version",
    )
)

# Settings that JAX does not list where `jaxhet` can read it: in the key of `jax.jit` only, or in
# none, though they change programs. A name that the installed JAX does not have is skipped.
MORE_CONFIG = (
    "jax_bcoo_cusparse_lowering",
    "jax_compiler_enable_remat_pass",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_custom_prng",
    "jax_experimental_unsafe_xla_runtime_errors",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_pallas_auto_assign_collective_ids",
    "jax_pallas_auto_assign_collective_ids_limit",
    "jax_pallas_poison_buffers",
    "jax_pgle_aggregation_percentile",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_sort_devices_by_process_index",
    "jax_use_magma",
    "jax_use_rgv3",
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
    return {**flags, **_jax_config(MORE_CONFIG)}


def of_program() -> dict[str, str]:
    """Returns the settings that JAX lowers a program with now, without those that are off.

    JAX keeps them in its trace context, which a context manager changes for one thread.
    """
    return {
        name: value
        for name, value in _jax_config().items()
        if name not in OWN_CONFIG and value not in ("False", "None", "0")
    }


def _jax_config(more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the compared parts of the trace context, and further settings of JAX's config."""
    from jax._src import config  # the launcher, which imports this module too, does without JAX

    pairs = zip(config.trace_context_names(), config.trace_context(), strict=True)
    context = {name: _text(value) for name, value in pairs if name not in NOT_COMPARED_CONFIG}
    values = config.config.values if more else {}
    return context | {name: _text(values[name]) for name in more if name in values}


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
