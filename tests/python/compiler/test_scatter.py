"""All-reduces of which ranks keep blocks: which become reduce-scatters, and what crosses then."""

import re

import pytest

from jaxhet.compiler import Options
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM

_JOB = hlo_text.job(0, 0, 1, 1, platform="cuda")
_ALL = "{{0,1,2,3}}"
_ACROSS = "{{0,2},{1,3}}"
_LOCAL = "{{0,1},{2,3}}"


def _reduce(name: str, x: str, groups: str, shape: str, reducer: str = "sum") -> str:
    return (
        f"{name} = {shape} all-reduce({x}), channel_id=1, replica_groups={groups},"
        f" use_global_device_ids=true, to_apply={reducer}"
    )


def _start(table: list[int]) -> str:
    """The first row that a device keeps, as XLA's partitioner writes it."""
    return f"""
      zero = s32[] constant(0)
      table = s32[{len(table)}] constant({{{",".join(map(str, table))}}})
      own = u32[] partition-id()
      entry = s32[1] dynamic-slice(table, own), dynamic_slice_sizes={{1}}
      start = s32[] reshape(entry)
    """


def _lines(body: str, options: Options | None = None) -> tuple[list[str], list[int]]:
    """The plan's lines without the groups, and the bytes of each."""
    before = SUM + SUM.replace("sum", "most").replace("add", "maximum")
    text = hlo_text.decomposed(body, _JOB, options, before)
    lines = re.findall(r"plan: \S+ (?:all_gather|all_to_all|permute) (.*?) \{\{", text)
    return lines, [int(b) for b in re.findall(r"; (\d+) bytes;", text)]


def _kept(groups: str, table: list[int], rows: int, after: str = "") -> str:
    root = "" if after else "ROOT "
    return f"""
      p = f32[8,4] parameter(0)
      {_start(table)}
      {_reduce("r", "p", groups, "f32[8,4]")}
      {root}kept = f32[{rows},4] dynamic-slice(r, start, zero), dynamic_slice_sizes={{{rows},4}}
      {after}
    """


@pytest.mark.parametrize("table", [[0, 2, 4, 6], [4, 0, 6, 2], [6, 4, 2, 0]])
def test_each_rank_keeps_its_own_block_whatever_their_order(table: list[int]):
    lines, num_bytes = _lines(_kept(_ALL, table, 2))
    assert lines == ["reduce-scatter sum dim 0 hierarchical f32[16]"]
    # (m - 1) / m of the data on a rail: half of the 128 bytes, shared by two rails.
    assert num_bytes == [32]


def test_ranks_of_one_island_keep_the_same_block():
    lines, num_bytes = _lines(_kept(_ACROSS, [0, 0, 4, 4], 4))
    assert lines == ["reduce-scatter sum dim 0 hierarchical f32[32]"]
    assert num_bytes == [64]


def test_an_all_reduce_on_islands_that_follows_is_absorbed():
    after = "ROOT " + _reduce("s", "kept", _LOCAL, "f32[4,4]")
    lines, num_bytes = _lines(_kept(_ACROSS, [0, 0, 4, 4], 4, after))
    assert lines == ["reduce-scatter sum dim 0 hierarchical f32[16]"]
    assert num_bytes == [32]


@pytest.mark.parametrize(
    ("table", "after"),
    [
        ([0, 0, 4, 4], "ROOT " + _reduce("s", "kept", _LOCAL, "f32[4,4]", "most")),
        ([0, 4, 4, 0], "ROOT " + _reduce("s", "kept", _LOCAL, "f32[4,4]")),
    ],
)
def test_another_reducer_or_other_blocks_are_not_absorbed(table: list[int], after: str):
    lines, _ = _lines(_kept(_ACROSS, table, 4, after))
    assert [line.replace("flat", "hierarchical") for line in lines] == [
        "reduce-scatter sum dim 0 hierarchical f32[32]"
    ]


def test_an_all_reduce_over_unequal_groups_is_not_absorbed():
    local = "{{0,1},{2},{3,4},{5}}"
    after = "ROOT " + _reduce("s", "kept", local, "f32[4,4]")
    body = _kept("{{0,3},{1,4},{2,5}}", [0, 0, 0, 4, 4, 4], 4, after)
    text = hlo_text.decomposed(body, hlo_text.job(0, 0, 0, 1, 1, 1, platform="cuda"))
    assert "reduce-scatter sum dim 0 hierarchical f32[32] {{0,3},{1,4},{2,5}}" in text
    assert f"replica_groups={local}" in text


def test_the_flat_algorithm_draws_nothing_in():
    after = "ROOT " + _reduce("s", "kept", _LOCAL, "f32[4,4]")
    lines, _ = _lines(_kept(_ACROSS, [0, 0, 4, 4], 4, after), Options(algorithm="flat"))
    assert lines == ["reduce-scatter sum dim 0 flat f32[32]"]


@pytest.mark.parametrize(
    "body",
    [
        _kept(_ALL, [0, 2, 4, 4], 2),  # two ranks keep the same block
        _kept(_ALL, [0, 1, 4, 6], 2),  # blocks overlap
        _kept(_ALL, [0, 0, 4, 4], 4),  # half of the blocks
        _kept(_ALL, [0, 2, 4, 6], 2, "ROOT t = (f32[8,4], f32[2,4]) tuple(r, kept)"),  # all used
    ],
)
def test_what_is_no_such_cut_stays_an_all_reduce(body: str):
    assert _lines(body)[0] == ["all-reduce sum hierarchical f32[16]"]


def test_a_start_that_depends_on_data_stays_an_all_reduce():
    body = f"""
      p = f32[8,4] parameter(0)
      start = s32[] parameter(1)
      zero = s32[] constant(0)
      {_reduce("r", "p", _ALL, "f32[8,4]")}
      ROOT kept = f32[2,4] dynamic-slice(r, start, zero), dynamic_slice_sizes={{2,4}}
    """
    assert _lines(body)[0] == ["all-reduce sum hierarchical f32[16]"]


def test_a_start_is_computed_as_axis_index_is():
    body = f"""
      p = f32[8,4] parameter(0)
      own = u32[] partition-id()
      one = u32[] constant(1)
      x = u32[] shift-right-logical(own, one)
      y = u32[] and(x, one)
      z = s32[] convert(y)
      size = s32[] constant(4)
      zero = s32[] constant(0)
      negative = s32[] multiply(z, size)
      is_negative = pred[] compare(negative, zero), direction=LT
      wrapped = s32[] add(negative, size)
      start = s32[] select(is_negative, wrapped, negative)
      {_reduce("r", "p", _ACROSS, "f32[8,4]")}
      ROOT kept = f32[4,4] dynamic-slice(r, start, zero), dynamic_slice_sizes={{4,4}}
    """
    assert _lines(body)[0] == ["reduce-scatter sum dim 0 hierarchical f32[32]"]
