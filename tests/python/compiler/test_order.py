"""The plan: the order of the program's equations, whatever a compiler made of them."""

import dataclasses
from collections.abc import Sequence

import pytest

from jaxhet._errors import JaxhetError, UsageError
from jaxhet.compiler import Job, Options, Plan, bridge, carrier, hlo
from jaxhet.compiler import proto as pb
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import all_reduce, feeding, of_two, shuffled

_JOB = hlo_text.job(0, 1)
_CUDA = hlo_text.job(0, 1, platform="cuda")
_ON_BOTH = pytest.mark.parametrize("job", [_JOB, _CUDA], ids=["cpu", "cuda"])
_ALONE = Options(bucket_bytes=0)

# The backward pass of three layers: g2 is there first, g0 last. The program sums them in another
# order, and the text has that one.
_BACKWARD = f"""
  w0 = f32[4,4] parameter(0)
  w1 = f32[4,4] parameter(1)
  w2 = f32[4,4] parameter(2)
  d3 = f32[4,4] parameter(3)
  d2 = f32[4,4] dot(d3, w2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  d1 = f32[4,4] dot(d2, w1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  d0 = f32[4,4] dot(d1, w0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {all_reduce("g0", "d0", shape="f32[4,4]", path="e3d3/g0")}
  {all_reduce("g1", "d1", shape="f32[4,4]", path="e4d2/g1")}
  {all_reduce("g2", "d2", shape="f32[4,4]", path="e5d1/g2")}
  ROOT r = (f32[4,4], f32[4,4], f32[4,4]) tuple(g0, g1, g2)
"""


def _plan(
    data: bytes,
    job: Job = _JOB,
    bucket_bytes: int = Options().bucket_bytes,
) -> Plan:
    return hlo_text.bridged(data, job, Options(bucket_bytes=bucket_bytes))[1]


def _assert_same(
    data: Sequence[bytes], job: Job, moved: list[list[str]], plan: Plan, count: int
) -> None:
    """Checks that modules move arrays as `moved` says and have the plan, in any valid order."""
    for seed in range(count):
        for other in (shuffled(one, seed) for one in data):
            assert feeding(other, job, _ALONE) == moved
            assert _plan(other, job, bucket_bytes=0).text == plan.text


def _sources(plan: Plan) -> list[str]:
    """Equations of the user, by index."""
    return [e.source.rpartition("/")[2] for e in plan.exchanges]


def test_order_is_that_in_which_they_can_start():
    assert _sources(_plan(of_two(_BACKWARD))) == ["g2", "g1", "g0"]


_MOST = hlo_text.SUM.replace("sum", "most").replace("add", "maximum")
_SCATTER = """update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0},
    index_vector_dim=1"""
# Equal opcodes, operands and shapes: only what they call tells the two scatters apart.
_SCATTERS = f"""
  p = f32[4] parameter(0)
  i = s32[2,1] parameter(1)
  u = f32[2] parameter(2)
  s = f32[4] scatter(p, i, u), {_SCATTER}, to_apply=most, metadata={{op_name="e3d0/scatter_max"}}
  t = f32[4] scatter(p, i, u), {_SCATTER}, to_apply=sum, metadata={{op_name="e1d0/scatter_add"}}
  {all_reduce("a", "s", path="e4d0/psum")}
  {all_reduce("b", "t", path="e2d0/psum")}
  ROOT r = f32[4] divide(a, b)
"""


def _moments(square: str, order: str = "z, q") -> str:
    """Sums of a sine and of a square, which compilers write in several ways."""
    first, second = order.split(", ")
    place = {"z": "e3d0/psum", "q": "e1d0/psum"}
    return f"""
  p = f32[4] parameter(0)
  two = f32[] constant(2)
  twos = f32[4] broadcast(two), dimensions={{}}
  q = f32[4] {square}, metadata={{op_name="e0d0/square"}}
  z = f32[4] sine(p)
  {all_reduce("a", first, path=place[first])}
  {all_reduce("b", second, path=place[second])}
  ROOT r = f32[4] divide({"a, b" if first == "z" else "b, a"})
"""


@_ON_BOTH
@pytest.mark.parametrize("bucket_bytes", [0, 1024])
@pytest.mark.parametrize(
    ("bodies", "moved"),
    [
        ([_SCATTERS], ["scatter_add", "scatter_max"]),
        (
            [
                _moments(square, order)
                for square in ("multiply(p, p)", "power(p, twos)")
                for order in ("z, q", "q, z")
            ],
            ["square", "sine"],
        ),
    ],
    ids=["scatters", "squares"],
)
def test_order_does_not_depend_on_how_an_operand_is_computed(
    bodies: list[str], moved: list[str], bucket_bytes: int, job: Job
):
    found, plans = set(), set()
    for data in (of_two(body, hlo_text.SUM + _MOST) for body in bodies):
        for seed in range(10):
            other = shuffled(data, seed)
            members = feeding(other, job, Options(bucket_bytes=bucket_bytes))
            found.add(tuple(name for names in members for name in names))
            plans.add(_plan(other, job, bucket_bytes=bucket_bytes).text)
    assert found == {tuple(moved)}
    assert len(plans) == 1


@_ON_BOTH
def test_operands_of_a_combined_collective_are_in_program_order(job: Job):
    """XLA's combiner leaves the names on the elements, and takes the operands as they come."""

    def combined(first: str, second: str) -> bytes:
        place = {first: 0, second: 1}
        return of_two(f"""
  p = f32[4] parameter(0)
  s = f32[4] sine(p)
  t = f32[4] cosine(p)
  r = (f32[4], f32[4]) all-reduce({first}, {second}), channel_id=1, replica_groups={{{{0,1}}}},
    use_global_device_ids=true, to_apply=sum, metadata={{op_name="(e3d0/psum:e2d0/psum)"}}
  a = f32[4] get-tuple-element(r), index={place["s"]}, metadata={{op_name="e3d0/psum"}}
  b = f32[4] get-tuple-element(r), index={place["t"]}, metadata={{op_name="e2d0/psum"}}
  ROOT d = f32[4] divide(a, b)
""")

    one, other = combined("s", "t"), combined("t", "s")
    assert feeding(one, job, Options()) == [["cosine", "sine"]]
    assert feeding(other, job, Options()) == [["cosine", "sine"]]
    assert _plan(one, job).text == _plan(other, job).text


def test_gathers_start_in_the_order_in_which_they_are_used():
    """Each could start at once; their shapes say nothing about who needs them first."""
    steps, x = [], "x"
    for i in range(12):
        steps.append(f"w{i} = f32[2,{16 - i}] parameter({i + 1})")
        steps.append(
            f"g{i} = f32[4,{16 - i}] all-gather(w{i}), channel_id=1, replica_groups={{{{0,1}}}},"
            f' dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="g{i}/d0u{i}"}}'
        )
        steps.append(
            f"d{i} = f32[4,{16 - i}] dot({x}, g{i}), lhs_contracting_dims={{1}},"
            f' rhs_contracting_dims={{0}}, metadata={{op_name="e{i}d{i + 1}/dot_general"}}'
        )
        steps.append(f"x{i} = f32[4,4] slice(d{i}), slice={{[0:4], [0:4]}}")
        x = f"x{i}"
    body = "x = f32[4,4] parameter(0)\n" + "\n".join(steps) + f"\nROOT r = f32[4,4] negate({x})"
    plan = _plan(of_two(body), _CUDA)
    assert [int(e.source[1:]) for e in plan.exchanges] == list(range(12))


def _gather(name: str, operand: str, path: str, size: int = 4) -> str:
    return (
        f"{name} = f32[{2 * size},4] all-gather({operand}), channel_id=1,"
        f" replica_groups={{{{0,1}}}}, dimensions={{0}}, use_global_device_ids=true"
        f"{hlo_text.named(path)}"
    )


# The backward pass of two layers, each recomputed: a barrier holds the weights of the first until
# the gradients of the second are there.
_RECOMPUTED = f"""
  w0 = f32[4,4] parameter(0)
  w1 = f32[4,4] parameter(1)
  d2 = f32[4,8] parameter(2)
  t1 = (f32[4,4], f32[4,8]) tuple(w1, d2)
  b1 = (f32[4,4], f32[4,8]) opt-barrier(t1)
  v1 = f32[4,4] get-tuple-element(b1), index=0
  c1 = f32[4,8] get-tuple-element(b1), index=1
  {_gather("g1", "v1", "e10d10/e0d0u0/g1")}
  d1 = f32[4,4] dot(c1, g1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {all_reduce("r1", "d1", shape="f32[4,4]", path="e10d10/e3d8/r1")}
  t0 = (f32[4,4], f32[4,4]) tuple(w0, d1)
  b0 = (f32[4,4], f32[4,4]) opt-barrier(t0)
  v0 = f32[4,4] get-tuple-element(b0), index=0
  c0 = f32[4,4] get-tuple-element(b0), index=1
  n0 = f32[4,4] copy(v0)
  {_gather("g0", "n0", "e20d20/USE/g0")}
  h0 = f32[4,4] slice(g0), slice={{[0:4], [0:4]}}
  d0 = f32[4,4] dot(c0, h0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {all_reduce("r0", "d0", shape="f32[4,4]", path="e20d20/e3d8/r0")}
  ROOT r = (f32[4,4], f32[4,4]) tuple(r0, r1)
"""


# A gather of a call's operand has the call's name.
@pytest.mark.parametrize("use", ["e0d0u0", "checkpoint"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_weights_of_a_recomputed_layer_are_gathered_before_the_gradients_behind_it(
    platform: str, use: str
):
    job = hlo_text.job(0, 1, platform=platform)
    data = of_two(_RECOMPUTED.replace("USE", use))
    for seed in range(10):
        plan = _plan(shuffled(data, seed), job, bucket_bytes=0)
        assert _sources(plan) == ["g1", "g0", "r1", "r0"]


def test_barrier_does_not_hold_gathers_of_weights_on_gpus():
    decomposed = hlo_text.after_pre(of_two(_RECOMPUTED), _CUDA)
    main = hlo.Module(decomposed).entry
    needed: dict[str, set[str]] = {}
    for i in main.instructions:
        operands = main.operands(i)
        needed[i.name] = set[str]().union({i.opcode}, *(needed[o.name] for o in operands))
    gathers = [i.name for i in main.instructions if i.opcode == "all-gather-start"]
    assert len(gathers) == 2
    assert all("dot" not in needed[name] for name in gathers)


@pytest.mark.parametrize("path", ["jit(jaxhet_per_platform_1)", "cond/branch_1_fun"])
def test_piece_of_one_platform_does_not_change_the_order(path: str):
    """For one vendor the piece is a kernel, for the other one nothing that takes time."""
    call = 'custom-call(v0), custom_call_target="twice"'
    plans = []
    for operation in ("copy(v0)", f'{call}, metadata={{op_name="e19d0/{path}/twice"}}', call):
        body = _RECOMPUTED.replace("copy(v0)", operation).replace("USE", "e0d0u0")
        plan = _plan(of_two(body), _CUDA, bucket_bytes=0)
        plans.append(_sources(plan))
    assert plans[0] == plans[1] == ["g1", "g0", "r1", "r0"]
    assert plans[2] == ["g1", "r1", "g0", "r0"]  # the kernel is the program's own


def test_gather_of_what_was_computed_does_not_start_early():
    """It has the path of the weights, and waits for a product."""
    body = _RECOMPUTED.replace("copy(v0)", "add(v0, c0)").replace("USE", "e0d0u0")
    plan = _plan(of_two(body), _CUDA, bucket_bytes=0)
    assert _sources(plan) == ["g1", "r1", "g0", "r0"]


_LOOP = f"""
body {{
  p = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  {all_reduce("s", "x", path="e5d0/e2d1/s")}
  ROOT r = (s32[], f32[4]) tuple(next, s)
}}

condition {{
  p = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(3)
  ROOT c = pred[] compare(i, n), direction=LT
}}
"""
# Gathers of weights around a loop: its first iteration uses some, others are used after it. In the
# depths of the paths, the loop counts as one operation.
_AROUND_A_LOOP = f"""
  x = f32[4] parameter(0)
  w0 = f32[4,4] parameter(1)
  w1 = f32[4,4] parameter(2)
  w2 = f32[4,4] parameter(3)
  {_gather("behind", "w1", "e7d0u1/behind")}
  {_gather("first", "w0", "e5d0/e1d0u5/first")}
  {_gather("far", "w2", "e9d30/e0d0u0/far")}
  zero = s32[] constant(0)
  t = (s32[], f32[4]) tuple(zero, x)
  w = (s32[], f32[4]) while(t), condition=condition, body=body
  ROOT r = (f32[8,4], f32[8,4], f32[8,4], (s32[], f32[4])) tuple(first, behind, far, w)
"""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gathers_around_a_loop(platform: str):
    """Weights for after the loop are the last to start before it, or start behind it."""
    job = hlo_text.job(0, 1, platform=platform)
    plan = _plan(of_two(_AROUND_A_LOOP, hlo_text.SUM + _LOOP), job)
    assert _sources(plan) == ["first", "behind", "s", "far"]


def test_step_never_comes_before_one_that_it_waits_for():
    """The path of a gather may name a later equation than the one that uses it."""
    body = f"""
  p = f32[4] parameter(0)
  {all_reduce("a", "p", path="e9d5/a")}
  n = f32[4] negate(a)
  {all_reduce("b", "n", path="e1d0/b")}
  ROOT r = (f32[4], f32[4]) tuple(a, b)
"""
    assert _sources(_plan(of_two(body))) == ["a", "b"]


# --- exchanges of one equation ---


def _twice(first: str, second: str, root: str = "tuple(a, b)") -> bytes:
    """A program with two all-reduces of one equation, of these operands."""
    return of_two(f"""
  p = f32[4] parameter(0)
  q = f32[4] parameter(1)
  s = f32[4] sine(p)
  t = f32[4] cosine(p)
  pair = (f32[4], f32[4]) tuple(s, t)
  b0 = (f32[4], f32[4]) opt-barrier(pair)
  s0 = f32[4] get-tuple-element(b0), index=0
  t0 = f32[4] get-tuple-element(b0), index=1
  {all_reduce("a", first, path="e3d0/psum")}
  {all_reduce("b", second, path="e3d0/psum")}
  ROOT r = (f32[4], f32[4]) {root}
""")


@_ON_BOTH
@pytest.mark.parametrize(
    ("first", "second", "moved"),
    [
        ("s", "a", [["sine"], ["exchange 0"]]),
        ("s0", "t0", [["cosine"], ["sine"]]),
        ("t0", "s0", [["cosine"], ["sine"]]),
        ("p", "q", [["parameter 0"], ["parameter 1"]]),
    ],
    ids=["waiting", "elements", "elements in the other order", "inputs"],
)
def test_exchanges_of_one_equation_are_told_apart(
    first: str, second: str, moved: list[list[str]], job: Job
):
    data = _twice(first, second)
    expected = _plan(data, job, bucket_bytes=0)
    assert len({e.line for e in expected.exchanges}) == 2
    _assert_same([data], job, moved, expected, 20)


def _behind_barrier(first: str, second: str, joined: str = "p, q") -> bytes:
    """A program with two all-reduces of one equation and one output, of these inputs."""
    return of_two(f"""
  p = f32[4] parameter(0)
  q = f32[4] parameter(1)
  pair = (f32[4], f32[4]) tuple({joined})
  b0 = (f32[4], f32[4]) opt-barrier(pair)
  p0 = f32[4] get-tuple-element(b0), index={joined.split(", ").index("p")}
  q0 = f32[4] get-tuple-element(b0), index={joined.split(", ").index("q")}
  s = f32[4] sine({first})
  t = f32[4] cosine({second})
  {all_reduce("a", "s", path="e3d0/psum")}
  {all_reduce("b", "t", path="e3d0/psum")}
  ROOT r = f32[4] divide(a, b)
""")


@_ON_BOTH
def test_exchanges_behind_a_barrier_are_told_apart_by_their_inputs(job: Job):
    """`jax.checkpoint` makes such a barrier, of all inputs of a layer that it recomputes."""
    data = _behind_barrier("p0", "q0")
    expected, moved = _plan(data, job, bucket_bytes=0), feeding(data, job, _ALONE)
    assert sorted(moved) == [["cosine"], ["sine"]]
    both = [_behind_barrier("p0", "q0", joined) for joined in ("p, q", "q, p")]
    _assert_same(both, job, moved, expected, 10)
    assert feeding(_behind_barrier("q0", "p0"), job, _ALONE) == moved[::-1]
    with pytest.raises(UsageError, match="nothing in the program tells one from the other"):
        _plan(_behind_barrier("p0", "p0"), job)


def test_other_connections_are_another_plan():
    """The plan tells two exchanges apart: no compiler can swap them unnoticed."""
    swapped = _twice("p", "q", root="tuple(b, a)")
    assert _plan(_twice("p", "q")).fingerprint != _plan(swapped).fingerprint


def test_exchanges_that_nothing_tells_apart_are_refused():
    body = f"""
  p = f32[4] parameter(0)
  s = f32[4] sine(p)
  t = f32[4] cosine(p)
  {all_reduce("a", "s", path="e3d0/psum")[:-1]} source_file="train.py" source_line=7}}
  {all_reduce("b", "t", path="e3d0/psum")[:-1]} source_file="train.py" source_line=7}}
  ROOT r = f32[4] divide(a, b)
"""
    words = (
        r"a\S* \(e3d0/psum train.py:7\) and b\S* \(e3d0/psum train.py:7\) .* nothing in the program"
    )
    for job in (_JOB, _CUDA):
        with pytest.raises(UsageError, match=words):
            _plan(of_two(body), job)


def _one_platform(platform: str) -> Job:
    return dataclasses.replace(hlo_text.job(0, 1, platform=platform), has_one_platform=True)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("s", "t"), ("t", "s"), ("c", "d")],
    ids=["opcodes", "turned", "constants"],
)
def test_one_compiler_tells_exchanges_apart_by_their_operands(
    first: str, second: str, platform: str
):
    """XLA's partitioner makes such modules of jnp.concatenate, jnp.pad and associative scans."""
    data = of_two(f"""
  p = f32[4] parameter(0)
  s = f32[4] sine(p)
  t = f32[4] cosine(p)
  one = f32[4] constant({{1, 1, 1, 1}})
  two = f32[4] constant({{1, 1, 1, 2}})
  c = f32[4] add(p, one), metadata={{op_name="c"}}
  d = f32[4] add(p, two), metadata={{op_name="d"}}
  same = f32[4] sine(p)
  {all_reduce("a", first, path="e3d0/psum")}
  {all_reduce("b", second, path="e3d0/psum")}
  quotient = f32[4] divide(a, b)
  ROOT r = f32[4] add(quotient, same)
""")
    job = _one_platform(platform)
    expected, moved = _plan(data, job, bucket_bytes=0), feeding(data, job, _ALONE)
    assert sorted(moved) == sorted(
        [[{"s": "sine", "t": "cosine"}.get(x, x)] for x in (first, second)]
    )
    assert len({e.line for e in expected.exchanges}) == 2
    _assert_same([data], job, moved, expected, 10)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_exchanges_whose_operands_only_chance_tells_apart_are_refused(platform: str):
    """Two calls of one generator of random numbers."""
    body = f"""
  low = f32[] constant(0)
  high = f32[] constant(1)
  s = f32[4] rng(low, high), distribution=rng_uniform
  t = f32[4] rng(low, high), distribution=rng_uniform
  {all_reduce("a", "s", path="e3d0/psum")}
  {all_reduce("b", "t", path="e3d0/psum")}
  ROOT r = f32[4] divide(a, b)
"""
    with pytest.raises(UsageError, match="nothing in the program tells one from the other"):
        _plan(of_two(body), _one_platform(platform))


@pytest.mark.parametrize("operands", ["s, s, s", "s, t, u"])
def test_sums_of_equal_arrays_need_no_mark(operands: str):
    """XLA makes one collective of `a.sum(), a.sum(), (a * 1).sum()`, with one array as operands."""
    data = of_two(f"""
  p = f32[4] parameter(0)
  s = f32[4] sine(p)
  t = f32[4] sine(p)
  u = f32[4] sine(p)
  ROOT r = (f32[4], f32[4], f32[4]) all-reduce({operands}), channel_id=1,
    replica_groups={{{{0,1}}}}, use_global_device_ids=true, to_apply=sum,
    metadata={{op_name="(e0d0/sum:e1d0/sum:e3d0/sum)"}}
""")
    assert {name for names in feeding(data, _JOB, _ALONE) for name in names} == {"sine"}


def _gathered_twice(first: str, second: str) -> bytes:
    """A program with two all-gathers of one equation, of operands that no platform leaves as is."""

    def gather(name: str, x: str) -> str:
        metadata = 'metadata={op_name="e3d0/mul"}'
        groups = "replica_groups={{0,1}}, use_global_device_ids=true, channel_id=1, dimensions={1}"
        return f"{name} = f32[4,6]{{0,1}} all-gather({x}), {groups}, {metadata}"

    return of_two(f"""
  p = f32[4,3]{{0,1}} parameter(0)
  s = f32[4,3]{{0,1}} sine(p)
  t = f32[4,3]{{0,1}} cosine(p)
  {gather("a", first)}
  {gather("b", second)}
  ROOT r = f32[4,6]{{0,1}} divide(a, b)
""")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_array_that_is_gathered_twice_needs_no_mark(platform: str):
    job = hlo_text.job(0, 1, platform=platform)
    data = _gathered_twice("s", "s")
    lines = [e.line for e in _plan(data, job).exchanges]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    for seed in range(5):
        assert feeding(shuffled(data, seed), job) == [["sine"], ["sine"]]
    with pytest.raises(UsageError, match="nothing in the program"):
        _plan(_gathered_twice("s", "t"), job)


def test_program_that_jax_did_not_lower_is_refused():
    data = hlo_text.module(hlo_text.entry(_BACKWARD), [0, 1], program="")
    with pytest.raises(UsageError, match=r"JAX did not lower it in this process"):
        _plan(data)


# --- fingerprints ---


def test_fingerprint_does_not_depend_on_the_source_line():
    """It is for people: islands may have their copies of a program at other places."""

    def plan(source: str) -> Plan:
        return _plan(of_two(_BACKWARD.replace('/g1"', f'/g1" {source}')))

    there = plan('source_file="/one/a/train.py" source_line=7')
    here = plan('source_file="/srv/b/train.py" source_line=8')
    assert there.fingerprint == here.fingerprint
    assert "a/train.py:7" in there.text


@pytest.mark.parametrize(
    ("before", "after"),
    [("f32[4]", "f32[5]"), ("f32[4]", "f16[4]"), ("{{0,1}}", "{{1,0}}"), ("main", "other")],
)
def test_fingerprint_differs_for_another_shape_type_group_or_program(before: str, after: str):
    body = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p")
    text = hlo_text.entry(body)
    data = hlo_text.module(text, [0, 1])
    if before == "main":
        other = pb.HloModuleProto.FromString(data)
        other.name = "jit_other"
        changed = other.SerializeToString()
    else:
        changed = hlo_text.module(text.replace(before, after), [0, 1])
    assert _plan(data).fingerprint != _plan(changed).fingerprint


def test_exchange_lost_on_the_way_is_an_error():
    decomposed = hlo_text.after_pre(of_two(_BACKWARD))
    module = pb.HloModuleProto.FromString(decomposed)
    for instruction in module.computations[-1].instructions:
        if carrier.index_of_call(instruction) == 1:
            instruction.frontend_attributes.Clear()
    with pytest.raises(JaxhetError, match=r"XLA changed the exchanges .* numbers \[0, 2\]"):
        bridge(module.SerializeToString(), _JOB)


def test_bridge_on_cpu_changes_only_sums_that_can_overlap():
    operand = "p = f32[4,4] parameter(0)\n"
    one = hlo_text.after_pre(of_two(operand + all_reduce("ROOT g", "p", shape="f32[4,4]")))
    bridged = bridge(one, _JOB)
    assert bridged is not None
    assert bridged[0] is one
    several, _ = hlo_text.bridged(of_two(_BACKWARD))
    starts = [i for i in hlo.Module(several).entry.instructions if carrier.is_start(i)]
    assert [list(i.control_predecessor_ids) for i in starts] == [[], [], []]


def test_bridge_on_gpu_makes_pairs_calls_at_their_places():
    job = hlo_text.job(0, 1, platform="rocm")
    decomposed = hlo_text.after_pre(of_two(_BACKWARD), job, _ALONE)
    bridged, _ = hlo_text.bridged(of_two(_BACKWARD), job, _ALONE)
    before = [i.id for i in hlo.Module(decomposed).entry.instructions]
    assert [i.id for i in hlo.Module(bridged).entry.instructions] == before
    calls = [line for line in hlo_text.to_text(bridged).splitlines() if "jaxhet_" in line]
    hlo_text.check(
        "\n".join(calls[1:]),  # the first line is the module's
        """
        CHECK-COUNT-3: "jaxhet_start"{{.*}}{session = 7 : i64, plan = {{[0-9]+}} : i64, index =
        CHECK-NOT: "jaxhet_start"
        """,
    )
    hlo_text.check(
        "\n".join(calls[1:]),
        """
        CHECK-NOT: collective-permute
        CHECK: [[START:%.*]] = f32[{{.*}} custom-call([[X:%.*]]), {{.*}}"jaxhet_start"
        CHECK-SAME: "custom_call_backend_config"
        CHECK: custom-call([[START]], [[X]]), custom_call_target="jaxhet_done"
        CHECK-SAME{LITERAL}: output_to_operand_aliasing={{}: (0, {})}
        CHECK-NOT: collective-permute
        """,
    )


def test_collective_that_appears_between_the_passes_is_an_error():
    body = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p")
    with pytest.raises(JaxhetError, match=r"XLA added r, which crosses islands, after"):
        bridge(of_two(body), _JOB)


def test_start_without_its_done_is_an_error():
    decomposed = hlo_text.after_pre(of_two(_BACKWARD), _CUDA, _ALONE)
    module = pb.HloModuleProto.FromString(decomposed)
    for instruction in module.computations[-1].instructions:
        if instruction.opcode == "collective-permute-done":
            instruction.opcode = "get-tuple-element"
    with pytest.raises(JaxhetError, match=r"exchange \S+ is used by \S+, not by its done alone"):
        bridge(module.SerializeToString(), _CUDA)
