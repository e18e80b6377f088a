"""JAX's persistent compilation cache in a job of two islands: always right, and of use."""

import json
import pathlib
import shutil
from typing import Any

import pytest
from two_islands import run_both

from tests.support.scripts import job, run

SCRIPT = """
import json
import jax, numpy as np, jaxhet
from jax.sharding import NamedSharding, PartitionSpec as P
jaxhet.initialize()
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

def told(program):
    events.clear()
    before = jaxhet.stats()["exchanges_started"]
    value = np.asarray(program().addressable_data(0)).tolist()
    hits = events.count("/jax/compilation_cache/cache_hits")
    return hits, value, jaxhet.stats()["exchanges_started"] - before

mesh = jaxhet.make_mesh({"x": -1})
weights = np.arange(6, dtype=np.float32).reshape(6, 1)
x = jax.make_array_from_callback((6, 1), NamedSharding(mesh, P("x")), lambda i: weights[i])

def weighted(a):
    return jax.lax.psum(a * jax.lax.axis_index("x"), "x")

across = jax.jit(jax.shard_map(weighted, mesh=mesh, in_specs=P("x"), out_specs=P()))
mine = jax.device_put(np.ones(3, np.float32), jax.local_devices()[0])
print("told", json.dumps({
    "across": told(lambda: across(x)),
    "local": told(lambda: jax.jit(lambda a: a * 2 + 1)(mine)),
}))
"""
ACROSS = [[55.0]]  # 0 + 1 + 4 + 9 + 16 + 25
LOCAL = [3.0, 3.0, 3.0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A cache that one run has filled."""
    folder = tmp_path_factory.mktemp("cache")
    first = _run(folder, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert first == [{"across": [0, ACROSS, 2], "local": [0, LOCAL, 0]}] * 3
    return folder


def _run(cache: pathlib.Path, **env: str) -> list[dict[str, Any]]:
    """Report of each process on its programs: hits, value, exchanges. Nothing is written."""
    common = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000",
        "JAXHET_CPU_DEVICES": "2",
        **env,
    }
    envs = [
        {**process, "JAXHET_ISLAND": island}
        for process, island in zip(job(3, **common), "aab", strict=True)
    ]
    ended = run(SCRIPT, *envs)
    assert all("told " in e.text for e in ended), ended
    return [json.loads(e.text.split("told ")[1].splitlines()[0]) for e in ended]


def test_second_run_hits_on_every_process_and_still_exchanges(filled: pathlib.Path) -> None:
    assert _run(filled) == [{"across": [1, ACROSS, 2], "local": [1, LOCAL, 0]}] * 3


def test_other_option_of_the_passes_is_no_hit(filled: pathlib.Path) -> None:
    told = _run(filled, JAXHET__ALGORITHM="hierarchical")
    assert [t["across"][:2] for t in told] == [[0, ACROSS]] * 3


def test_broken_entries_are_no_hit(filled: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    told = _run(folder)
    assert [t["across"] for t in told] == [[0, ACROSS, 2]] * 3


@pytest.mark.slow
def test_dump_has_every_program_although_the_cache_has_it(
    filled: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    told = _run(filled, JAXHET_DUMP=str(tmp_path))
    assert [t["across"] for t in told] == [[0, ACROSS, 2]] * 3
    assert len(list(tmp_path.glob("*.before.hlo.txt"))) == 3


_DUMPED = """
exec("def gr\\u00f6\\u00dfe(a): return jax.lax.psum(a, 'x')")
body = globals()["gr\\u00f6\\u00dfe"]
print("sum", np.asarray(over_islands(body)(x))[0, 0])
"""


def test_dump_that_can_not_be_written_says_so_and_ends_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for ended in run_both(_DUMPED, JAXHET_DUMP=str(tmp_path / "file" / "dump")):
        assert "sum 2.0" in ended.text
        assert "can't write program jit_" in ended.text
        assert "Not a directory; make room there or choose another JAXHET_DUMP" in ended.text


def test_dump_has_names_that_the_locale_does_not_know(tmp_path: pathlib.Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for ended in run_both(_DUMPED, JAXHET_DUMP=str(tmp_path), **plain):
        assert "sum 2.0" in ended.text
    plans = [path.read_text("utf-8") for path in tmp_path.glob("*.plan.txt")]
    assert ["gr\u00f6\u00dfe" in plan for plan in plans] == [True, True]


def test_programs_shared_between_hosts_are_refused() -> None:
    envs = job(2, JAX_SHARE_BINARY_BETWEEN_HOSTS="1")
    for ended in run("import jax, jaxhet; jaxhet.initialize(); jax.numpy.ones(3) + 1", *envs):
        assert "UsageError: jax_share_binary_between_hosts gives all processes" in ended.text
        assert "turn it off in a job of several islands" in ended.text
