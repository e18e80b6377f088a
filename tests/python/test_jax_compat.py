"""The parts of JAX that `jaxhet._jax.compat` relies on."""

import dataclasses
import os
import pathlib
import socket
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import (
    compilation_cache,
    config,
    hardware_utils,
    xla_bridge,
)
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from jaxhet._errors import UsageError
from jaxhet._jax import compat, jaxlib, platforms
from tests.support import replaced, scripts

_LEAVES_IN_A_HOOK = """
import sys, jax
from jaxhet._jax import compat

def leave(module):
    sys.exit(42)

compat.register_passes(leave, lambda module: None, "cpu")
jax.jit(lambda x: x + 1)(1.0)
"""


def test_program_that_leaves_while_it_compiles_keeps_its_exit_code() -> None:
    (ended,) = scripts.run(_LEAVES_IN_A_HOOK, {})
    assert ended.code == 42, ended.text


_EXIT = """
import os
from jax._src import api, dispatch
from jaxhet._jax import compat
api.clear_caches = lambda: print("cleared")
dispatch.RuntimeTokenSet.block_until_ready = lambda self: print("waited")
if "SKIP" in os.environ:
    compat.skip_exit_waits()
"""


def test_exit_hooks_of_jax_can_be_skipped() -> None:
    run, skipped = scripts.run(_EXIT, {}, {"SKIP": "1"})
    assert (run.text, skipped.text) == ("cleared\nwaited\n", "")


@pytest.mark.parametrize("version", ["0.11.1", "0.4.38", "0.9"])
def test_old_version_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match=rf"jaxlib {version} is too old .*install jax>=0\.11\.2$"):
        jaxlib.require_supported("jaxlib", version)


def test_coordinator_refuses_an_old_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxlib, "VERSION", "0.11.1")
    with pytest.raises(UsageError, match=r"jaxlib 0\.11\.1 is too old"):
        jaxlib.start_coordination_service("127.0.0.1", 1, {})


def test_version_above_those_that_were_tested_is_told() -> None:
    for version in (jax.__version__, "0.11.2", "0.12.0.1", "0.12.9.dev20261101"):
        jaxlib.require_supported("jax", version)
        assert not jaxlib.untested(version)
    words = "jaxhet was tested with jax up to 0.12, and this is jax 0.13.0"
    assert jaxlib.untested("0.13.0") == words
    assert jaxlib.untested("1.0")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the user's choice of a platform, and the installed plugins."""

    def set_up(chosen: str | None, *plugins: str, nvidia: bool = True) -> None:
        named = dict.fromkeys(("cpu", "tpu"), xla_bridge._backend_factories["cpu"])
        gpus = {name: dataclasses.replace(named["cpu"], priority=500) for name in plugins}
        monkeypatch.setattr(xla_bridge, "_backend_factories", named | gpus)
        monkeypatch.setattr(xla_bridge, "_plugins_registered", True)
        monkeypatch.setattr(hardware_utils, "has_visible_nvidia_gpu", lambda: nvidia)
        names = tuple(chosen.split(",")) if chosen else ()
        monkeypatch.setattr(platforms, "_chosen_platforms", lambda: names)

    return set_up


@pytest.mark.parametrize(
    ("chosen", "plugins", "nvidia", "platform", "has_cpu"),
    [
        (None, [], True, "cpu", True),
        (None, ["cuda"], True, "cuda", True),
        (None, ["cuda"], False, "cpu", True),
        (None, ["rocm"], False, "rocm", True),
        (None, ["cuda", "rocm"], True, "cuda", True),
        (None, ["cuda", "rocm"], False, "rocm", True),
        ("cpu", ["cuda"], True, "cpu", True),
        ("cuda", ["cuda"], True, "cuda", False),
        ("rocm,cpu", ["rocm"], True, "rocm", True),
        ("gpu", ["cuda"], True, "cuda", False),
        ("cuda,cpu", [], False, "cpu", True),
    ],
)
def test_platform_is_the_one_that_jax_takes(
    choose: Callable[..., None],
    chosen: str | None,
    plugins: list[str],
    nvidia: bool,
    platform: str,
    has_cpu: bool,
) -> None:
    choose(chosen, *plugins, nvidia=nvidia)
    assert platforms.expected_platform() == platform
    assert platforms.has_cpu_backend() == has_cpu


def test_platform_without_a_gpu(choose: Callable[..., None]) -> None:
    choose("cuda", "cuda", nvidia=False)
    with pytest.raises(UsageError, match="JAX_PLATFORMS is cuda, and this machine has no NVIDIA"):
        platforms.expected_platform()


def test_wait_for_devices_ends_when_they_are_idle_and_loads_no_program() -> None:
    wait = compat.device_wait()
    with jax.log_compiles(), warnings.catch_warnings(record=True) as logged:
        jax.clear_caches()
        assert wait(60)
    assert not logged


def test_wait_for_arrays_ends_when_they_are_computed() -> None:
    products = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    x = jnp.zeros((600, 600))
    products.lower(x).compile()
    array = products(x)
    assert not compat.wait_for_arrays(0)
    assert not array.is_ready()
    assert compat.wait_for_arrays(60)
    assert array.is_ready()


@pytest.mark.parametrize(
    ("devices", "flags", "given", "threads"),
    [
        (4, "", {}, "8"),
        (-1, "--xla_force_host_platform_device_count=6 --xla_a=b", {}, "12"),
        (-1, '--xla_force_host_platform_device_count="6"', {}, "12"),
        (-1, "", {}, None),
        (2, "", {}, None),  # the cores are enough
        (4, "", {"PJRT_NPROC": "5"}, "5"),
        (4, "", {"NPROC": "5"}, None),
    ],
)
def test_cpu_client_has_two_threads_for_each_device(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    flags: str,
    given: dict[str, str],
    threads: str | None,
) -> None:
    environ = {"XLA_FLAGS": flags, **given}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_num_cpu_devices=devices))
    line = platforms._leave_threads_for_launches()
    assert environ.get("PJRT_NPROC") == threads
    was_set = threads is not None and "PJRT_NPROC" not in given
    assert line.startswith(f"PJRT_NPROC={threads} was set: " if was_set else "")
    assert bool(line) == was_set


def test_use_gpus_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: dict[str, str] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    platforms.use_gpus("rocm", (0, 2))
    assert set_to == {"jax_rocm_visible_devices": "0,2"}


@pytest.fixture
def cache_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A persistent compilation cache of our own; what a guard replaces in JAX is put back."""
    replaced.put_back(monkeypatch)
    compilation_cache.reset_cache()
    with (
        config.compilation_cache_dir(str(tmp_path)),
        config.persistent_cache_min_compile_time_secs(0),
    ):
        yield tmp_path
    compilation_cache.reset_cache()


def test_guard_of_the_compilation_cache_salts_accepts_and_writes(
    cache_folder: pathlib.Path,
) -> None:
    salts, salted, modules, answers = ["one"], [], [], [True]

    def salt(device_ids: tuple[int, ...]) -> str:
        salted.append(device_ids)
        return salts[-1]

    def accept(module: bytes) -> bool:
        modules.append(module)
        return answers[-1]

    def compile_anew() -> int:
        """Compiles a program that memory does not hold; returns how many modules were shown."""
        modules.clear()
        jax.clear_caches()
        assert int(jax.jit(lambda a: a + 41)(1)) == 42
        return len(modules)

    compat.guard_compilation_cache(salt, accept, writes=True)
    shown, texts = [], []
    for change in (  # compiled on one line: where a program is called is in the key
        lambda: None,
        lambda: None,
        lambda: answers.append(False),
        lambda: salts.append("another"),
    ):
        change()
        shown.append(compile_anew())
        texts += [compat.module_text(module) for module in modules]
    assert shown == [0, 1, 1, 0]
    assert all("HloModule jit__lambda" in text for text in texts)
    assert salted[-1] == (jax.devices()[0].id,)
    assert list(cache_folder.glob("jit__lambda*"))


def test_guard_of_the_compilation_cache_writes_nothing_where_another_process_does(
    cache_folder: pathlib.Path,
) -> None:
    compat.guard_compilation_cache(lambda _: "", lambda _: True, writes=False)
    jax.clear_caches()
    assert int(jax.jit(lambda a: a + 41)(1)) == 42
    assert not list(cache_folder.glob("jit__lambda*"))


def test_service_listens_on_a_port_that_is_its_own_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = _jax.get_distributed_runtime_service

    def checked(address: str, *args: Any, **kwargs: Any) -> Any:
        host, port = address.rsplit(":", 1)
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server((host, int(port)))
        return start(address, *args, **kwargs)

    monkeypatch.setattr(_jax, "get_distributed_runtime_service", checked)
    address, service = jaxlib.start_coordination_service("127.0.0.1", 1, {})
    host, port = address.rsplit(":", 1)
    for _ in range(20):  # none of them to another socket of that port
        socket.create_connection((host, int(port)), timeout=5).close()
    service.shutdown()


def test_blocking_call_is_left_when_the_check_raises() -> None:
    def check() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        compat.run_with_checks(lambda: time.sleep(0.5), check)
    assert compat.run_with_checks(lambda: 3, lambda: None) == 3
