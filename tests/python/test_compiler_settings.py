"""Settings of compilers: their values, their differences, and the words for these."""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax._src import config

from jaxhet._jax import compiler_settings
from jaxhet._jax.compiler_settings import Difference, differences, parse_flags, settings, xla_flags
from jaxhet._job.process_info import ProcessInfo, differences_between_islands, disagreement
from tests.support.members import described

ISA = "XLA_FLAGS --xla_cpu_max_isa"
X64 = "jax_enable_x64"


def _info(process: int, island: str, set_to: Mapping[str, str]) -> ProcessInfo:
    return described(process, island, settings=dict(set_to))


# Flags of XLA.


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {}),
        ("--a=1 --b=2\t--c=\n", {"a": "1", "b": "2", "c": ""}),
        ("--a=1 --b=2 --a=3", {"a": "3", "b": "2"}),
        ("--a --b=x=y", {"a": "true", "b": "x=y"}),
        ('--a="x  y"--b=\'p "q\' --c=7', {"a": "x  y", "b": 'p "q', "c": "7"}),
        (r'--a="x \"y\" z" --b', {"a": 'x "y" z', "b": "true"}),
        ('--a="no end --b=1', {"a": "no end --b=1"}),
        ("--a=1 other --b=2", {"a": "1"}),
    ],
)
def test_flags_are_parsed_as_xla_does(text: str, flags: dict[str, str]) -> None:
    assert parse_flags(text) == flags


def test_flags_of_a_file_are_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_b=2\n")
    assert xla_flags({"XLA_FLAGS": str(file)}) == {"xla_a": "1", "xla_b": "2"}
    assert xla_flags({"XLA_FLAGS": f"{file}.absent"}) == {}
    assert xla_flags({"XLA_FLAGS": " --xla_a=1"}) == {"xla_a": "1"}
    assert xla_flags({}) == {}


def _compared(*names: str) -> list[str]:
    given = {"XLA_FLAGS": " ".join(f"--{name}=1" for name in names)}
    words = [name.split(" --") for name in settings(given) if name.startswith("XLA_FLAGS ")]
    return [flag for _, flag in words]


def test_flags_that_change_neither_are_left_out() -> None:
    names = [
        "xla_cpu_collective_call_warn_stuck_timeout_seconds",
        "xla_cpu_enable_xprof_traceme",
        "xla_detailed_logging",
        "xla_dump_hlo_as_text",
        "xla_dump_to",
        "xla_enable_scoped_logging_timers",
        "xla_force_host_platform_device_count",
        "xla_gpu_cuda_data_dir",
        "xla_gpu_dump_autotune_results_to",
        "xla_gpu_experimental_dump_fdo_profiles",
        "xla_gpu_kernel_cache_file",
        "xla_gpu_per_fusion_autotune_cache_dir",
        "xla_gpu_print_compilation_stats",
        "xla_gpu_rocm_max_trace_events",
        "xla_gpu_trace_annotation_level",
        "xla_hlo_profile",
    ]
    assert _compared(*names) == []
    for pattern in compiler_settings.NOT_COMPARED:
        assert any(re.fullmatch(pattern, name) for name in names), pattern


# JAX's config.


def _listed_by_jax() -> set[str]:
    """Settings that the source of JAX puts into the key of a trace or of `jax.jit`."""
    found = set()
    for file in pathlib.Path(jax.__file__).parent.rglob("*.py"):
        if "include_in_" not in (source := file.read_text()):
            continue
        for call in ast.walk(ast.parse(source)):
            keywords = getattr(call, "keywords", ())
            given = {word.arg: getattr(word.value, "value", None) for word in keywords}
            if given.get("include_in_jit_key") or given.get("include_in_trace_context"):
                args = getattr(call, "args", ())
                name = given.get("name") or (args and getattr(args[0], "value", None))
                found |= {str(name)} if name else set()
    return {name.lower() for name in found}


def test_all_settings_in_keys_of_jax_are_compared_or_have_a_reason() -> None:
    listed = {*_listed_by_jax(), *config.trace_context_names()}
    assert {X64, "jax_optimization_level", "jax_threefry_partitionable"} <= listed
    # Without a name in the config, and in the key of `jax.jit` only: the state of a thread.
    own_of_a_thread = {"device_context", "trace_state"}
    of_pallas = {name for name in listed if name.startswith("pallas_")}  # in its own equations
    left = listed - settings({}).keys() - own_of_a_thread - of_pallas
    assert left - compiler_settings.NOT_COMPARED_CONFIG.keys() == set()


def test_tables_have_no_stale_row() -> None:
    listed = {*_listed_by_jax(), *config.trace_context_names()}
    newer = {"jax_no_collectives"} if jax.__version__.startswith("0.11.") else set[str]()
    assert set(compiler_settings.NOT_COMPARED_CONFIG) - newer <= listed
    assert set(compiler_settings.MORE_CONFIG) <= set(jax.config.values)
    assert set(compiler_settings.MORE_CONFIG).isdisjoint(config.trace_context_names())


def test_setting_of_a_context_manager_belongs_to_a_program() -> None:
    usual = compiler_settings.of_program()
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        changed = compiler_settings.of_program()
    assert changed == {**usual, "jax_numpy_dtype_promotion": "strict", X64: "True"}
    with jax.default_device(jax.devices()[-1]):
        assert compiler_settings.of_program() == usual


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (X64, True, "True"),
        ("jax_default_matmul_precision", "highest", "highest"),
        ("jax_numpy_dtype_promotion", "strict", "strict"),
        ("jax_random_seed_offset", 7, "7"),
    ],
)
def test_change_of_the_config_is_seen(name: str, value: Any, text: str) -> None:
    before = settings({})
    old = jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert settings({}) == {**before, name: text}
    finally:
        jax.config.update(name, old)


# Differences.


def test_differences_are_sorted_and_say_what_is_not_set() -> None:
    ours = {X64: "True", "b": "1", "a": "", "same": "x"}
    theirs = {X64: "False", "c": "x\ny", "a": "2", "same": "x"}
    assert differences(ours, theirs) == [
        Difference("a", "''", "2"),
        Difference("b", "1", "not set"),
        Difference("c", "not set", r"'x\ny'"),
        Difference(X64, "True", "False"),
    ]
    assert differences(ours, dict(ours)) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            {ISA: "AVX"},
            {},
            f"{ISA} differs within island 'nv0': AVX in process 0 (nv0, pid 100 on host), not set"
            " in process 1 (nv0, pid 101 on host); start all processes of an island with the same"
            " value",
        ),
        (
            {X64: "False"},
            {X64: "True"},
            f"{X64} differs within island 'nv0': False in process 0 (nv0, pid 100 on host), True in"
            " process 1 (nv0, pid 101 on host); start all processes of an island with the same"
            " value",
        ),
    ],
)
def test_difference_within_an_island_is_refused(
    ours: dict[str, str], theirs: dict[str, str], words: str
) -> None:
    assert disagreement(_info(0, "nv0", ours), _info(1, "nv0", theirs)) == words
    assert disagreement(_info(0, "nv0", ours), _info(1, "amd0", theirs)) is None
    assert disagreement(_info(0, "nv0", ours), _info(1, "nv0", ours)) is None


def test_difference_of_the_config_between_islands_says_that_programs_differ() -> None:
    members = [_info(0, "nv0", {ISA: "SSE4_2", X64: "False"}), _info(1, "amd0", {X64: "True"})]
    assert differences_between_islands(members) == [
        f"island amd0 differs from nv0 in {ISA}: not set, SSE4_2 in nv0; in {X64}: True,"
        " False in nv0; equal functions may become different programs, with different results or a"
        " PlanMismatchError"
    ]


def test_each_island_that_differs_from_the_one_of_process_0_has_a_line() -> None:
    sets = [{ISA: "AVX"}, {ISA: "AVX2"}, {ISA: "AVX"}, {}]
    members = [_info(i, f"island{i}", set_to) for i, set_to in enumerate(sets)]
    lines = differences_between_islands(members[::-1])
    assert [line.partition(" in ")[0] for line in lines] == [
        "island island1 differs from island0",
        "island island3 differs from island0",
    ]


def test_patch_releases_may_differ_between_islands_only() -> None:
    def info(process: int, island: str, jax: str, plugin: str) -> ProcessInfo:
        versions = {"jax": jax, "jaxlib": jax, "jaxhet": "0.1.0", "plugin": plugin}
        return dataclasses.replace(_info(process, island, {}), versions=versions)

    nvidia = info(0, "nv0", "0.12.0.1", "jax-cuda13-pjrt 0.12.0.1")
    amd = info(1, "amd0", "0.12.0", "jax-rocm7-pjrt 0.12.0")
    assert disagreement(nvidia, amd) is None
    assert differences_between_islands([nvidia, amd]) == [
        "nv0 has jax 0.12.0.1, jaxlib 0.12.0.1, jaxhet 0.1.0, plugin jax-cuda13-pjrt 0.12.0.1; amd0"
        " has jax 0.12.0, jaxlib 0.12.0, jaxhet 0.1.0, plugin jax-rocm7-pjrt 0.12.0: islands may"
        " have different patch releases"
    ]
    within = disagreement(nvidia, dataclasses.replace(amd, island="nv0"))
    assert within is not None
    assert within.startswith("the version of jax differs")
    newer = disagreement(nvidia, info(1, "amd0", "0.12.1", "jax-rocm7-pjrt 0.12.1"))
    assert newer is not None
    assert newer.startswith("the version of jax differs")
    same = info(1, "amd0", "0.12.0.1", "jax-rocm7-pjrt 0.12.0")
    assert differences_between_islands([nvidia, same]) == []
