"""GPUs that the launcher gives to each process, and settings of XLA before its start."""

import pathlib

import jax
import pytest

from jaxhet._errors import UsageError
from jaxhet._gpu import gpu_settings
from jaxhet._jax import jaxlib
from jaxhet._launch import environ
from jaxhet._launch import gpus as _gpus
from jaxhet._launch.gpus import Gpus
from tests.support.commands import python

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_OWN = "JAXHET_LOCAL_DEVICE_IDS"


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("cuda", {}, Gpus("cuda", ("0", "1", "2", "3"))),
        ("cuda", {_CUDA: "2, 3"}, Gpus("cuda", ("2", "3"))),
        ("cuda", {_CUDA: ""}, Gpus("cuda", ())),
        ("cuda", {_HIP: "1"}, Gpus("cuda", ("0", "1", "2", "3"))),
        ("rocm", {_HIP: "1", "ROCR_VISIBLE_DEVICES": "4,5"}, Gpus("rocm", ("1",))),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5"}, Gpus("rocm", ("0", "1"))),
    ],
)
def test_visible_gpus(platform: str, environ: dict[str, str], expected: Gpus) -> None:
    assert _gpus.visible(platform, environ, 4) == expected


@pytest.mark.parametrize(
    ("count", "wanted", "processes", "expected"),
    [
        (4, None, 2, ["01", "23"]),
        (5, None, 2, ["01", "23"]),
        (4, [1, 2], 2, ["0", "12"]),
        (1, None, 1, ["0"]),
    ],
)
def test_share_of_gpus(
    count: int, wanted: list[int] | None, processes: int, expected: list[str]
) -> None:
    gpus = Gpus("cuda", tuple(map(str, range(count))))
    assert ["".join(mine) for mine in _gpus.share(gpus, wanted, processes)] == expected


def test_share_of_fewer_gpus_than_processes() -> None:
    words = r"2 processes need 2 GPUs \(1\+1\), and 1 are visible .*; ask for fewer with --devices"
    with pytest.raises(UsageError, match=words):
        _gpus.share(Gpus("cuda", ("0",)), None, 2)


def test_gpus_that_are_listed_twice_are_shared_by_processes_and_seen_once_by_each() -> None:
    listed = Gpus("cuda", ("0", "1", "0", "1"))
    shares = _gpus.share(listed, None, 4)
    seen = [listed.environment(mine)[_CUDA] for mine in shares]
    assert seen == ["0,1", "1,0", "0,1", "1,0"]


def test_processes_of_a_host_are_given_gpus_in_turn() -> None:
    base = {"JAX_PLATFORMS": "cuda", _CUDA: "5,6,7", "KEPT": "1"}
    found = [environ.complete(base, {"OF_JOB": "2"}, (None,) * 3, i) for i in range(3)]
    assert [(env[_CUDA], env[_OWN]) for env in found] == [
        ("5,6,7", "0"),
        ("6,5,7", "0"),
        ("7,5,6", "0"),
    ]
    for env in found:
        assert (env["KEPT"], env["OF_JOB"], env["JAX_PLATFORMS"]) == ("1", "2", "cuda")
        assert "JAXHET_CPU_DEVICES" not in env


@pytest.mark.parametrize("chosen", ["cpu", "cpu,cuda", "tpu"])
def test_chosen_platform_without_gpus_gets_none(chosen: str) -> None:
    assert _gpus.find({"JAX_PLATFORMS": chosen}) is None


@pytest.mark.parametrize(
    ("plugins", "gpus", "expected"),
    [
        (["xla_cuda13"], {"cuda"}, "cuda"),
        (["xla_rocm7"], {"rocm"}, "rocm"),
        (["xla_cuda13", "xla_rocm7"], {"rocm"}, "rocm"),
        (["xla_cuda13"], {"rocm"}, "cpu"),
        (["xla_cuda13"], set(), "cpu"),
        ([], {"cuda"}, "cpu"),
    ],
)
def test_platform_needs_its_plugin_and_its_gpus(
    plugins: list[str],
    gpus: set[str],
    expected: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in plugins:
        folder = tmp_path / "jax_plugins" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(jaxlib, "count_gpus", lambda platform: int(platform in gpus))
    assert jaxlib.installed_platform(None) == expected
    assert jaxlib.installed_platform("gpu") == expected


# Flags.


def test_flags_that_are_needed_are_added_and_those_of_the_user_stay() -> None:
    assert gpu_settings.complete("") == "--xla_gpu_shard_autotuning=false"
    given = '--xla_dump_to="a  b" --xla_gpu_autotune_level=4'
    assert gpu_settings.complete(given) == f"{given} --xla_gpu_shard_autotuning=false"


def test_options_of_programs_over_islands_leave_those_of_the_user() -> None:
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    assert gpu_settings.over_islands("--a=1") == {scheduler: True, limit: 32}
    assert gpu_settings.over_islands(f"--{limit}=2 --{scheduler}=false") == {}
    line = gpu_settings.added(f"--{limit}=2", gpu_settings.complete(f"--{limit}=2"))
    assert line == (
        "added to XLA_FLAGS: --xla_gpu_shard_autotuning=false; to programs over islands:"
        f" --{scheduler}=true (exchanges overlap with compute)"
    )


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("xla_gpu_shard_autotuning=true", "the process that compiles for others would wait"),
        ("xla_gpu_enable_pipelined_p2p", "XLA's compiler would abort"),
        ("xla_gpu_enable_pipelined_p2p=True", "XLA's compiler would abort"),
        (
            "xla_gpu_experimental_pipeline_parallelism_opt_level="
            "PIPELINE_PARALLELISM_OPT_LEVEL_ENABLE",
            "XLA's compiler would abort",
        ),
        ("xla_gpu_disable_async_collectives=ALLREDUCE", "nothing would be computed while"),
    ],
)
def test_flag_that_is_refused_is_named_with_the_reason(flag: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpu_settings.complete(f"--xla_dump_to=x --{flag}")
    assert f"XLA_FLAGS has --{flag.partition('=')[0]}=" in str(caught.value)
    assert why in str(caught.value)
    assert str(caught.value).endswith("remove it in a job of several islands")


@pytest.mark.parametrize("name", gpu_settings.REFUSED)
def test_flag_that_is_turned_off_is_accepted(name: str) -> None:
    off = {
        "xla_gpu_disable_async_collectives": "",
        "xla_gpu_experimental_pipeline_parallelism_opt_level": (
            "PIPELINE_PARALLELISM_OPT_LEVEL_DISABLE"
        ),
    }.get(name, "false")
    given = f"--{name}=true --{name}={off}"  # the last counts
    assert gpu_settings.complete(given).startswith(given)


def test_flags_are_known_to_xla() -> None:
    off = [f"--{name}=false" for name in gpu_settings.REFUSED if "pipeline_par" not in name]
    flags = [gpu_settings.complete(""), *(f for f in off if "disable_async" not in f)]
    for more, text in (([], ""), (["--xla_gpu_no_such=1"], "Unknown flag")):  # which is fatal
        program = ("-c", "import jax; jax.jit(lambda x: x + 1)(1)")
        result = python(*program, exit_code=None, env={"XLA_FLAGS": " ".join([*flags, *more])})
        assert (result.returncode == 0) == (not more), result.stderr
        assert text in result.stderr


def test_flags_are_put_into_the_environment_also_those_of_a_file(tmp_path: pathlib.Path) -> None:
    environ: dict[str, str] = {}
    assert gpu_settings.prepare(environ)
    assert environ == {"XLA_FLAGS": gpu_settings.complete("")}
    (tmp_path / "flags").write_text("--xla_dump_to=x\n")
    environ["XLA_FLAGS"] = str(tmp_path / "flags")
    gpu_settings.prepare(environ)
    assert environ["XLA_FLAGS"].split()[0] == "--xla_dump_to=x"
    assert "--xla_gpu_shard_autotuning=false" in environ["XLA_FLAGS"]


def test_programs_are_not_shared_where_the_user_controls_tuning() -> None:
    environ = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    assert not gpu_settings.prepare(environ)
    assert gpu_settings.prepare({})


_QUEUES = pytest.mark.parametrize(
    ("platform", "name", "number"),
    [("cuda", "CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("rocm", "GPU_MAX_HW_QUEUES", "16")],
)


@_QUEUES
def test_streams_get_hardware_queues_of_their_own(platform: str, name: str, number: str) -> None:
    environ: dict[str, str] = {}
    assert f"{name}={number} was" in gpu_settings.give_queues_to_streams(platform, environ)
    assert environ == {name: number}


@_QUEUES
def test_number_of_hardware_queues_of_the_user_stays(platform: str, name: str, number: str) -> None:
    environ = {name: "16"}
    assert not gpu_settings.give_queues_to_streams(platform, environ)
    assert environ == {name: "16"}
    with pytest.warns(UserWarning, match=f"{name}=8: streams that share .* leave it unset"):
        gpu_settings.give_queues_to_streams(platform, {name: "8"})


def test_shared_programs_are_refused() -> None:
    words = "gives all processes one island's program; turn it off"
    jax.config.update("jax_share_binary_between_hosts", True)
    try:
        with pytest.raises(UsageError, match=words):
            gpu_settings.prepare({})
    finally:
        jax.config.update("jax_share_binary_between_hosts", False)
