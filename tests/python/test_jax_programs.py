"""The parts of JAX that `_jax/programs.py` relies on: a new JAX that changes them fails here."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet._jax import programs
from jaxhet._traced import jaxprs
from tests.support import replaced

_ATTRIBUTE = "test_program"


@pytest.fixture(autouse=True)
def jax_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back what the functions put into JAX."""
    replaced.put_back(monkeypatch)
    jax.clear_caches()
    yield
    jax.clear_caches()
    _jax.PjitFunctionCache.clear_all()


def _lowered(num_partitions: int) -> str:
    """The text of a program with two calls of one function, on a number of devices."""
    programs.watch_lowering(
        jaxprs.labels,
        jaxprs.argument_labels,
        lambda *p: f"{p[0]} {jaxprs.describe(*p).digest}",
        _ATTRIBUTE,
    )
    inner = jax.jit(jnp.sin)
    mesh = jax.sharding.AbstractMesh((num_partitions,), ("x",))
    x = jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(mesh, P("x")))
    lowered = jax.jit(lambda x: inner(x) + inner(x + 1)).trace(x).lower(lowering_platforms=("cpu",))
    return lowered.as_text(debug_info=True)


def test_equations_are_numbered_in_names() -> None:
    text = _lowered(2)
    for label in ("e0d0", "e1d0", "e2d0", "e3d0"):
        assert f"/{label}" in text, "the numbers of equations are not in the names of operations"


def test_places_in_the_source_are_the_users() -> None:
    text = _lowered(2)
    assert "tests/python/test_jax_programs.py" in text
    assert "jaxhet/_jax/" not in text


def test_module_of_several_devices_is_marked() -> None:
    assert f'mhlo.frontend_attributes = {{{_ATTRIBUTE} = "jit' in _lowered(2)


def test_module_of_one_device_is_not_marked() -> None:
    assert _ATTRIBUTE not in _lowered(1)


# --- options of the compiler ---


def test_options_reach_the_compiler_of_the_programs_that_they_are_for() -> None:
    asked: list[frozenset[int]] = []

    def options(devices: frozenset[int]) -> dict[str, bool | int] | None:
        asked.append(devices)
        return {"xla_no_such_option": True} if len(asked) == 1 else None

    programs.add_compiler_options(options)
    x = jax.device_put(np.ones(3), jax.devices()[-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        jax.jit(lambda x: x * 5)(x)
    assert jax.jit(lambda x: x * 7)(x)[0] == 7
    assert set(asked) == {frozenset({jax.devices()[-1].id})}


def test_options_of_a_call_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    levels: list[int] = []
    compile_program = compiler.compile_or_get_cached

    def spied(backend: Any, computation: Any, devices: Any, options: Any, *args: Any) -> Any:
        seen.append(dict(options.env_option_overrides))
        levels.append(options.executable_build_options.optimization_level)
        return compile_program(backend, computation, devices, options, *args)

    monkeypatch.setattr(compiler, "compile_or_get_cached", spied)
    scheduler, level = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_autotune_level"
    programs.add_compiler_options(lambda devices: {scheduler: True, level: 3})
    jax.jit(lambda x: x * 5, compiler_options={scheduler: False, "optimization_level": 29})(1.0)
    jax.jit(lambda x: x * 7)(1.0)
    assert seen == [{scheduler: False, level: 3}, {scheduler: True, level: 3}]
    assert levels == [0, 0]


# --- launches ---


def _in_thread(function: Any) -> list[Any]:
    """Result or exception of a function in another thread."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append(function())
        except RuntimeError as error:
            result.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return result


@pytest.mark.parametrize("ahead_of_time", [False, True], ids=["jit", "compiled"])
def test_every_launch_by_another_thread_is_asked_for(ahead_of_time: bool) -> None:
    """Although JAX launches most calls without Python."""
    asked: list[str] = []

    def check(name: str) -> None:
        asked.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{name} by another thread")

    programs.watch_lowering(jaxprs.labels, jaxprs.argument_labels, lambda *p: "guarded", _ATTRIBUTE)
    _mark_all(mlir)
    programs.guard_launches(_ATTRIBUTE, lambda name: name == "guarded", check, lambda module: False)
    programs.own_launches(1)
    x = jax.device_put(np.ones(4), NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P()))
    f = jax.jit(lambda x: x * 2)
    call = f.lower(x).compile() if ahead_of_time else f
    for _ in range(5):
        call(x)
    in_main = len(asked)
    assert 1 <= in_main <= 2, "JAX launches the owner's calls in Python: they are slow"
    for _ in range(3):
        (result,) = _in_thread(lambda: call(x))
        assert isinstance(result, RuntimeError), "a launch by another thread went past the guard"
    assert call(x)[0] == 2


def _mark_all(module: Any) -> None:
    """Lets programs of one device be marked: the machine of this test may have one only."""
    marked = module.lower_jaxpr_to_module

    def with_two(name: str, jaxpr: Any, **kwargs: Any) -> Any:
        result = marked(name, jaxpr, **kwargs)
        with result.module.context:
            from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

            result.module.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
                {_ATTRIBUTE: ir.StringAttr.get("guarded")}
            )
        return result

    module.lower_jaxpr_to_module = with_two


def test_sharding_of_xla_is_told_by_its_tiles_and_devices() -> None:
    device = jax.devices()[0]
    abstract = jax.sharding.AbstractMesh((2,), ("x",))
    split = NamedSharding(abstract, P("x"))._to_xla_hlo_sharding(1)
    replicated = GSPMDSharding.get_replicated([device])

    def digest(sharding: Any) -> str:
        return jaxprs.describe("f", jax.make_jaxpr(jnp.sin)(1.0), [sharding], lambda eqn: "").digest

    before = digest(replicated)
    assert hash(replicated)
    assert replicated.is_fully_replicated
    assert digest(replicated) == before
    others = [GSPMDSharding((device,) * count, split) for count in (1, 2)]
    assert len({before, *map(digest, others)}) == 3
