"""The table of names of JAX that jaxhet replaces: a new JAX that changes one of them fails here."""

import ast
import inspect
import pathlib
import types

import jax
import pytest
from jax._src import xla_bridge

from jaxhet._errors import UsageError
from jaxhet._jax import replacements
from jaxhet._jax.replacements import REPLACEMENTS
from tests.support import replaced

# Parameters that the stand-ins rely on. After "*": others, by name. "...": more do not matter.
_PARAMETERS = {
    "jax._src.interpreters.mlir:jaxpr_subcomp": "ctx jaxpr name_stack ...",
    "jax._src.interpreters.mlir:lower_jaxpr_to_module": (
        "module_name jaxpr * arg_names arg_shardings axis_context num_partitions result_shardings"
    ),
    "jax._src.callback:emit_python_callback": (
        "ctx callback token operands operand_avals result_avals * sharding"
    ),
    "jax._src.compiler:compile_or_get_cached": "backend computation devices compile_options ...",
    "jax._src.compiler:backend_compile_and_load": (
        "backend module executable_devices options host_callbacks"
    ),
    "jax._src.compiler:_cache_write": (
        "cache_key compile_time_secs module_name backend executable"
    ),
    "jax._src.compilation_cache:get_cache_key": "module devices ...",
    "jax._src.compilation_cache:get_executable_and_time": "cache_key compile_options backend ...",
    "jax._src.compilation_cache:put_executable_and_time": (
        "cache_key module_name executable backend compile_time"
    ),
    "jax._src.pjit:_get_fastpath_data": "executable ...",
    "jax._src.interpreters.pxla:ExecuteReplicated.__call__": "self args",
    "jax.experimental.serialize_executable:_JaxPjrtUnpickler.persistent_load": "self pid",
    "jax._src.dispatch:_device_put_sharding_impl": "x aval device copy",
    "jax._src.xla_bridge:backends": "",
    "jax.experimental.multihost_utils:_handle_array_process_allgather": "inp tiled",
    "jax.experimental.multihost_utils:broadcast_one_to_all": "in_tree is_source",
    "jax.experimental.multihost_utils:sync_global_devices": "name",
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_name_is_in_jax_as_the_table_says(name: str) -> None:
    """Which row a new JAX breaks, and what stops working then."""
    owner, attribute = replacements.place(name)
    if name not in _PARAMETERS:
        assert not isinstance(getattr(owner, attribute, None), types.FunctionType)
        return
    parameters = inspect.signature(getattr(owner, attribute)).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    expected, _, keywords = _PARAMETERS[name].partition("*")
    *first, last = expected.split() or [""]
    broken = f"jax {jax.__version__} changed {name}; jaxhet uses it to {REPLACEMENTS[name]}"
    if last == "...":
        assert positional[: len(first)] == first, broken
    else:
        assert positional == expected.split(), broken
    assert set(keywords.split()) <= {p.name for p in parameters}, broken


def test_table_has_all_names_that_are_replaced() -> None:
    """No file of `_jax/` gives a name of JAX another value but by the table."""
    used: list[str] = []
    for file in pathlib.Path(replacements.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("install", "put"):
                used += [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
    assert set(used) == set(REPLACEMENTS)


def test_last_stand_in_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced.put_back(monkeypatch)
    monkeypatch.setattr(xla_bridge, "backends", lambda: ["of JAX"])
    for name in ("first", "second"):
        replacements.install("jax._src.xla_bridge:backends")(
            lambda original, name=name: [name, *original()]
        )
    assert list(xla_bridge.backends()) == ["second", "first", "of JAX"]


@pytest.mark.parametrize("name", ["jax._src.compiler:gone", "jax._src.gone:f", "jax._src.pjit:A.f"])
def test_name_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(REPLACEMENTS, name, "do this")
    words = rf"jax \S+ has no {name}, which jaxhet relies on to do this; install a version that"
    with pytest.raises(UsageError, match=words):
        replacements.install(name)
