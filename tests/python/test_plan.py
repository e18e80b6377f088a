"""`jaxhet.plan`'s report on HLO text, and the command `jaxhet plan` with the real compilers."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import jaxhet
from jaxhet import PlannedExchange, PlanReport, _plan
from jaxhet._errors import UsageError
from jaxhet._pretended import deviceless, rocm_stubs
from jaxhet.cli import plan as cli_plan
from jaxhet.compiler import Options, hlo
from jaxhet.compiler.exchange import Call, ExchangeKind, ExchangeSpec, Movement
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce
from tests.python.compiler.install_plugins import PLUGINS
from tests.python.compiler.test_deviceless import require_compiler
from tests.support import schemas
from tests.support.commands import python

ROOT = pathlib.Path(__file__).parents[2]


def _bridged(body: str, before: str = SUM, platform: str = "cpu", bucket_bytes: int = 0) -> bytes:
    job = hlo_text.job(0, 1, platform=platform)
    options = Options(bucket_bytes=bucket_bytes)
    return hlo_text.bridged(hlo_text.of_two(body, before), job, options)[0]


# --- lines ---


_ROOT = f"ROOT {all_reduce('r', 'p')}"
_SPEC = ExchangeSpec(
    Call(session=7),
    Movement(ExchangeKind.PERMUTE, ranks=(0, 2, 1, -1), group_size=2, deadline_ms=5),
    collective="all-gather dim 2",
    algorithm="hierarchical",
    num_operands=1,
    shapes="f32[6],s8[1]",
    groups=((0, 2), (1, 3)),
    digest="0123456789abcdef",
    source="jit(f)/\u00e9 net.py:7 and 2 more",
    note="groups meet the islands in different orders",
    num_bytes=64,
    num_collectives=3,
)


def test_line_of_an_exchange() -> None:
    place = {"place": "jit_f:0/while0.body #1", "tie": "2"}
    spec = dataclasses.replace(_SPEC, **place, algorithm="flat", num_operands=4)
    assert spec.line == (
        "jit_f:0/while0.body #1 permute all-gather dim 2 flat of 4 f32[6],s8[1] {{0,2},{1,3}}"
        " @0123456789abcdef #2"
    )


def test_record_is_read_as_it_was_written() -> None:
    spec = dataclasses.replace(_SPEC, place="f", tie="1", is_pipelined=True).in_plan(1 << 62, 3)
    assert (spec.call.plan, spec.index, spec.kind) == (1 << 62, 3, "permute")
    assert ExchangeSpec.from_json(spec.to_json()) == spec


def test_record_survives_the_text_of_a_module() -> None:
    """XLA prints and parses it, whatever the user's names are."""
    name = 'jit(f)/a"b{c}\\d \u00e9'
    data = hlo_text.of_two(f"p = f32[4] parameter(0)\n{_ROOT}")
    module = hlo.Module(data)
    module.entry.root.metadata.op_name = name
    decomposed = hlo_text.after_pre(module.serialize())
    module = hlo.Module(decomposed)
    for instruction in module.entry.instructions:  # XLA's parser has other rules for metadata
        instruction.ClearField("metadata")
    (again,) = hlo_text.planned(hlo_text.parsed(hlo_text.to_text(module.serialize())))
    assert [again] == hlo_text.planned(decomposed)
    assert again.source == name.replace('"', "'")


# --- how often, and what overlaps ---


def _loop(name: str, body: str, trip_count: str) -> str:
    """An instruction; `trip_count` is what XLA writes, or nothing."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trip_count}"}}}}' if trip_count else ""
    return f"{name} = f32[4] while(x), condition=always, body={body}{config}"


_LOOPS = f"""
{SUM}
always {{
  x = f32[4] parameter(0)
  ROOT r = pred[] constant(true)
}}
inner {{
  x = f32[4] parameter(0)
  ROOT {all_reduce("r", "x")}, metadata={{op_name="inner"}}
}}
"""


def _outer(inner_trips: str) -> str:
    body = f"  x = f32[4] parameter(0)\n  ROOT {_loop('r', 'inner', inner_trips)}"
    return f"{_LOOPS}\nouter {{\n{body}\n}}"


@pytest.mark.parametrize(
    ("inner", "outer", "times"), [("3", "5", 15), ("0", "5", 0), ("", "5", None), ("3", "", None)]
)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_times_are_the_product_of_trip_counts(
    inner: str, outer: str, times: int | None, platform: str
) -> None:
    body = f"  x = f32[4] parameter(0)\n  ROOT {_loop('r', 'outer', outer)}"
    (row,) = _plan.of_module(_bridged(body, _outer(inner), platform)).exchanges
    assert (row.times, row.source) == (times, "inner")
    assert row.bytes_per_step == 16 * (1 if times is None else times)


def test_times_of_a_branch_are_not_known() -> None:
    body = """
  x = f32[4] parameter(0)
  p = pred[] parameter(1)
  ROOT r = f32[4] conditional(p, x, x), true_computation=inner, false_computation=same
"""
    same = "same {\n  ROOT x = f32[4] parameter(0)\n}\n"
    (row,) = _plan.of_module(_bridged(body, _LOOPS + same)).exchanges
    assert row.times is None


_DOTS = f"""
  x = f32[4,4] parameter(0)
  {all_reduce("early", "x", shape="f32[4,4]", path="early")}
  a = f32[4,4] dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  b = f32[4,4] dot(a, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {all_reduce("late", "b", shape="f32[4,4]", path="e2d2/late")}
  ROOT r = (f32[4,4], f32[4,4]) tuple(early, late)
"""


def test_products_are_those_between_start_and_done() -> None:
    module = hlo.Module(_bridged(_DOTS, platform="cuda"))
    starts, dones, others = [], [], []
    for instruction in module.entry.instructions:
        target = instruction.custom_call_target
        place = {"jaxhet_start": starts, "jaxhet_done": dones}.get(target, others)
        place.append(instruction.id)
    dots = [i.id for i in module.entry.instructions if i.opcode == "dot"]
    rest = [i for i in others if i not in dots]
    order = [starts[0], dots[0], dones[0], starts[1], *dots, dones[1], *rest]
    module.proto.schedule.sequences[module.entry.id].instruction_ids[:] = order
    rows = _plan.of_module(module.serialize()).exchanges
    assert [(r.source, r.products, r.is_overlapped) for r in rows] == [
        ("early", 1, True),
        ("e2/late", 2, True),
    ]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_collectives_that_share_an_exchange_are_counted(platform: str) -> None:
    body = """
  x = f32[4] parameter(0)
  y = f32[3] parameter(1)
  many = (f32[4], f32[3]) all-reduce(x, y), channel_id=1, replica_groups={{0,1}},
    use_global_device_ids=true, to_apply=sum
  ROOT r = ((f32[4], f32[3])) tuple(many)
"""
    (row,) = _plan.of_module(_bridged(body, platform=platform, bucket_bytes=100)).exchanges
    assert (row.num_collectives, row.num_bytes) == (2, 28)


def test_module_without_exchanges_has_an_empty_report() -> None:
    module = hlo_text.module(hlo_text.entry("  ROOT x = f32[4] parameter(0)"), [0, 1])
    report = _plan.of_module(module)
    assert report == PlanReport(())
    assert report.text() == "nothing crosses islands\n"
    assert report.exposed_seconds(1.0) == 0
    assert json.loads(report.to_json())["bytes_per_step"] == 0


# --- the report ---

_ROW = PlannedExchange(
    index=0,
    collective="all-reduce sum",
    kind="permute",
    algorithm="hierarchical",
    why="",
    shapes="f32[500]",
    groups=((0, 1), (1, 0)),
    num_bytes=2000,
    num_collectives=1,
    times=3,
    products=2,
    place="jit_f:0",
    source="psum f.py:1",
)
_UNKNOWN = dataclasses.replace(
    _ROW,
    index=1,
    algorithm="flat",
    why="islands have different numbers of members: 1+2",
    groups=tuple((i, i + 10) for i in range(10)),
    num_bytes=999,
    num_collectives=4,
    times=None,
    products=0,
)
_REPORT = PlanReport((_ROW, _UNKNOWN))

_TEXT = """\
#  collective          kind     algorithm     bytes   times    overlap     groups                    source
0  all-reduce sum      permute  hierarchical  2.0 kB  3        2 products  {0,1},{1,0}               psum f.py:1
1  4 × all-reduce sum  permute  flat [1]      999 B   unknown  0 products  {0,10},{1,11},{2,12},{3…  psum f.py:1

exchanges in each step: at least 4; bytes that a rank sends to other islands: at least 7.0 kB
[1] islands have different numbers of members: 1+2
"""  # noqa: E501 (as it is printed)


def test_text() -> None:
    assert _REPORT.text() == _TEXT


def test_json_has_the_rows_and_the_totals() -> None:
    schemas.check("plan", _REPORT.to_json())
    told = json.loads(_REPORT.to_json())
    assert told["exchanges"][1]["times"] is None
    assert told["exchanges"][0]["groups"] == [[0, 1], [1, 0]]
    assert (told["exchanges_per_step"], told["bytes_per_step"]) == (4, 6999)
    assert told["is_exact"] is False


def test_exposed_time_is_that_of_exchanges_without_products() -> None:
    assert _REPORT.exposed_seconds(2.0, 5.0) == pytest.approx(5e-6 + 999 / 2e9)


# --- arguments of `jaxhet.plan` ---


def test_plan_needs_a_job() -> None:
    with pytest.raises(UsageError, match=r"call jaxhet\.initialize\(\) first"):
        jaxhet.plan(jax.jit(lambda: 1))


def test_what_is_not_jitted_is_refused() -> None:
    def step() -> None: ...

    with pytest.raises(UsageError, match=r"step is no jitted function; give what jax\.jit or"):
        _plan.to_stage(step, (), {})


# --- the command ---

_PROGRAM = """
import jax
import jax.numpy as jnp
import jaxhet
from jax.sharding import NamedSharding, PartitionSpec as P

jaxhet.initialize()

def train_step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y ** 2)
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

def step():
    mesh = jaxhet.make_mesh({"data": -1})
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    weights = [jax.ShapeDtypeStruct((512, 512), "float32", sharding=whole)] * 4
    x = jax.ShapeDtypeStruct((4096, 512), "float32", sharding=rows)
    return jaxhet.jit(train_step, out_shardings=whole), (weights, x)

def lowered():
    jitted, args = step()
    return jitted.lower(*args)

def ragged():
    mesh = jaxhet.make_mesh({"x": -1})
    def f(a):
        i, n = jnp.array([0, 0]), jnp.array([1, 1])
        return jax.lax.ragged_all_to_all(a, jnp.zeros(4), i, n, i, n, axis_name="x")
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("x")))
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=False, **specs)), (x,)

def elsewhere():
    return jax.jit(lambda x: x + 1), (1.0,)

def nested():
    return jaxhet.plan(*step())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("program") / "example.py"
    path.write_text(_PROGRAM)
    return path


def _run(
    *arguments: str, folder: pathlib.Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{PLUGINS}", "JAX_PLATFORMS": "", "XLA_FLAGS": ""}
    command = ("-m", "jaxhet.cli", "plan", *arguments)
    return python(*command, folder=folder, exit_code=None, env={**path, **env})


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_command_with_a_vendors_compiler(vendor: str, program: pathlib.Path) -> None:
    require_compiler(vendor)
    sizes = ["--islands", "2", "--devices", "2"]
    result = _run("--vendor", vendor, *sizes, "--json", f"{program}:step")
    assert result.returncode == 0, result.stderr
    schemas.check("plan", result.stdout)
    told = json.loads(result.stdout)
    rows = told["exchanges"]
    assert sum(row["num_collectives"] for row in rows) == 4
    assert {row["algorithm"] for row in rows} == {"hierarchical"}
    assert all("example.py:" in row["source"] for row in rows)
    assert rows[0]["products"] > 0
    assert told["bytes_per_step"] == 4 * 512 * 512 * 4 // 2  # half of each gradient over each rail


def test_command_on_cpu_prints_a_table(program: pathlib.Path) -> None:
    result = _run("--devices", "2", f"{program}:lowered", JAXHET__ALGORITHM="flat")
    assert result.returncode == 0, result.stderr
    assert "flat [1]" in result.stdout
    assert "not scheduled" in result.stdout
    assert "[1] the option algorithm is flat, or auto on CPU" in result.stdout
    assert "time at" not in result.stdout


def test_command_with_one_island_finds_nothing(program: pathlib.Path) -> None:
    result = _run("--islands", "1", "--devices", "2", "example.py:step", folder=program.parent)
    assert (result.returncode, result.stdout) == (0, "nothing crosses islands\n"), result.stderr


def test_command_says_in_words_what_is_wrong(program: pathlib.Path) -> None:
    result = _run(f"{program}:nested")
    assert result.returncode == 2
    assert "jaxhet.UsageError: " in result.stderr
    assert "the command `jaxhet plan` asks by itself; return the jitted function" in result.stderr
    assert "Traceback" not in result.stderr


def test_command_refuses_a_program_for_other_devices(program: pathlib.Path) -> None:
    require_compiler("cuda")
    result = _run("--vendor", "cuda", f"{program}:elsewhere")
    assert result.returncode == 2
    assert "the program is not for the devices of the pretended job" in result.stderr


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("example.py", "'example.py' names no function; give file.py:function"),
        ("/nowhere/example.py:step", "there is no file /nowhere/example.py"),
        ("empty.py:step", "empty.py has no function 'step'"),
    ],
)
def test_target_that_is_not_there(
    target: str, text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        cli_plan._load(target)


def test_target_that_returns_something_else() -> None:
    with pytest.raises(UsageError, match=r"f.py:f returned int; it must return \(jitted, args\)"):
        cli_plan._program("f.py:f", 1)


# --- compilers that are not there ---


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_missing_compiler_says_what_to_install(
    vendor: deviceless.Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match=rf"no compiler for {vendor}.*'.\[deviceless\]'"):
        deviceless._find(vendor)


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nm" else f"/bin/{tool}")
    with pytest.raises(UsageError, match="needs stub libraries, and nm to build them; install a C"):
        rocm_stubs.load(PLUGINS)
