"""Permutes on GPUs: all are exchanges, inside islands as well. Halves of exchanges."""

import pytest

from jaxhet.compiler import Job, Options, decompose
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import check, decomposed

_FOUR = hlo_text.job(0, 0, 1, 1)
_TWO_BY_TWO = hlo_text.job(0, 0, 1, 1, platform="cuda")
_RING, _SWAPS = "{{0,1},{1,2},{2,3},{3,0}}", "{{0,1},{1,0},{2,3},{3,2}}"


def _permute(pairs: str) -> str:
    return f"""
      p = f32[4] parameter(0)
      ROOT r = f32[4] collective-permute(p), channel_id=1, source_target_pairs={pairs}
    """


@pytest.mark.parametrize(("pairs", "num_bytes"), [(_RING, 16), (_SWAPS, 0)])
def test_no_permute_on_gpu_is_left_to_xla_which_would_join_all_devices_for_it(
    pairs: str, num_bytes: int
):
    check(
        decomposed(_permute(pairs), _TWO_BY_TWO),
        f"""
        CHECK-NOT: collective-permute(
        CHECK: collective-permute-start(
        CHECK-SAME{{LITERAL}}: source_target_pairs={pairs}
        CHECK-NOT: collective-permute{{{{(-start)?}}}}(
        CHECK: plan: test permute collective-permute f32[4] {{{{.*}}}}; {num_bytes} bytes;
        """,
    )


def test_what_stays_on_its_device_is_kept_there():
    check(
        decomposed(_permute("{{0,0},{1,2}}"), _TWO_BY_TWO),
        """
        CHECK: collective-permute-start(
        CHECK-SAME{LITERAL}: source_target_pairs={{1,2}}
        CHECK-NOT: collective-permute-start(
        CHECK: [[RECEIVED:%.*]] = f32[4]{0} collective-permute-done(
        CHECK: select({{.*}}, %p, [[RECEIVED]])
        CHECK-NOT: select(
        """,
    )


def _half(half: str, pairs: str) -> str:
    body = _permute(pairs).replace("f32", "s32")
    return f'{body.rstrip()}, metadata={{op_name="jit(f)/jaxhet_{half}_g_0/ppermute"}}'


@pytest.mark.parametrize(
    ("half", "pairs", "line"),
    [
        ("start", "{{2,0},{0,3}}", "all_gather start g_0 s32[4] {{2,0,3}}"),
        ("start", "{{3,1},{2,0}}", "all_gather start g_0 s32[4] {{2,0},{3,1}}"),
        ("finish", "{{2,0},{0,3}}", "permute finish g_0 s32[4] {{2,2},{0,0},{3,3}}"),
        ("finish", "{{2,0},{0,2}}", "permute finish g_0 s32[4] {{2,0},{0,2}}"),
    ],
)
def test_halves_of_exchanges_join_the_members_of_chains(half: str, pairs: str, line: str):
    assert f" {line} @" in decomposed(_half(half, pairs), _FOUR)


def test_half_inside_an_island_is_its_operand():
    data = hlo_text.module(hlo_text.entry(_half("start", "{{1,0},{2,3}}")), [0, 1, 2, 3])
    check(
        hlo_text.to_text(decompose(data, _FOUR, Options()) or b""),
        """
        CHECK-LABEL: ENTRY
        CHECK-NOT: collective-permute
        CHECK: ROOT %r = s32[4]{0} copy(%p)
        """,
    )


@pytest.mark.parametrize(
    ("pairs", "job"),
    [
        (_SWAPS, _FOUR),
        ("{{0,0},{1,1}}", _TWO_BY_TWO),
        (_RING, hlo_text.job(0, 0, 0, 0, platform="cuda")),
    ],
    ids=["on CPU", "nothing moves", "one island"],
)
def test_other_permutes_inside_islands_are_left_alone(pairs: str, job: Job):
    data = hlo_text.module(hlo_text.entry(_permute(pairs)), [0, 1, 2, 3])
    assert decompose(data, job, Options()) is None
