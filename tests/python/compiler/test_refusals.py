"""PRE on HLO text: collectives and modules that it refuses, and the words."""

import pytest

from jaxhet._errors import UsageError
from jaxhet.compiler import Options, collectives, decompose
from tests.python.compiler import hlo_text
from tests.python.compiler.hlo_text import SUM, all_reduce

_ONE = "p = f32[4] parameter(0)\nROOT " + all_reduce("r", "p")
_TWO_ISLANDS = hlo_text.job(0, 1)
_FOUR = hlo_text.job(0, 0, 1, 1)


def _refused(body: str, job=_TWO_ISLANDS, before: str = SUM, ranks=None) -> str:
    if ranks is None:
        ranks = list(range(len(job.islands)))
    data = hlo_text.module(hlo_text.entry(body, before), ranks)
    with pytest.raises(UsageError) as caught:
        decompose(data, job, Options())
    return str(caught.value)


def test_collective_in_a_declared_piece_is_refused():
    message = _refused(
        """
      p = f32[4] parameter(0)
      ROOT r = f32[4] all-reduce(p), channel_id=1, replica_groups={{0,2},{1,3}},
        use_global_device_ids=true, to_apply=sum,
        metadata={op_name="jit(f)/jaxhet_per_platform/psum"}
    """,
        _FOUR,
    )
    assert "it is inside a piece that jaxhet.per_platform declares" in message
    assert "Put it outside of the piece" in message


def test_what_cannot_cross_is_refused_with_op_groups_source_and_advice():
    message = _refused(
        """
      p = f32[4] parameter(0)
      q = s32[2] parameter(1)
      ROOT r = f32[4] ragged-all-to-all(p, p, q, q, q, q), channel_id=1,
        replica_groups={{0,2},{1,3}}, metadata={op_name="jit(f)/ragged" source_file="/a/m/net.py"
        source_line=42}
    """,
        _FOUR,
    )
    assert message == (
        "ragged-all-to-all r (jit(f)/ragged m/net.py:42) has groups of ranks {{0,2},{1,3}} over"
        " islands 0, 1: ragged-all-to-all can't cross islands. Keep this op inside an island"
        " (jaxhet.make_mesh orders devices so that the last axes do not cross), or write it with"
        " jax.lax.all_to_all of equal parts."
    )


def test_collective_without_a_lowering_is_no_broadcast(monkeypatch: pytest.MonkeyPatch):
    """Steps 1 and 3 of "Add a collective" in CONTRIBUTING.md."""
    monkeypatch.delitem(collectives._INSIDE_ONLY, "ragged-all-to-all")
    body = """
      p = f32[4] parameter(0)
      q = s32[2] parameter(1)
      ROOT r = f32[4] ragged-all-to-all(p, p, q, q, q, q), channel_id=1,
        replica_groups={{0,2},{1,3}}, metadata={op_name="jit(f)/e0/ragged"}
    """
    module = hlo_text.module(hlo_text.entry(body, SUM), list(range(4)))
    with pytest.raises(AssertionError, match="ragged-all-to-all has no lowering"):
        decompose(module, _FOUR, Options())


def test_unknown_reducer_is_refused():
    message = _refused(_ONE, before=SUM.replace("add", "subtract"))
    assert "its reducer is not one of sum, product, min, max, and, or, xor" in message


def test_groups_of_different_sizes_are_refused_but_for_all_reduces():
    body = """
      p = f32[4] parameter(0)
      ROOT r = f32[8] all-gather(p), channel_id=1, replica_groups={{0,1},{2}}, dimensions={0},
        use_global_device_ids=true
    """
    assert (
        "its groups have different sizes, and only an all-reduce (jax.lax.psum, pmax, pmin) can"
        " have such groups. Use groups of equal size"
    ) in _refused(body, hlo_text.job(0, 1, 1))


def test_devices_outside_the_job_are_refused():
    assert "runs on devices [50], which are not in the job" in _refused(_ONE, ranks=[0, 5])


def test_module_without_device_assignment_is_refused():
    assert "has collectives but no device assignment" in _refused(_ONE, ranks=[])


def test_broadcast_from_a_traced_source_is_refused():
    message = _refused(
        """
      p = f32[4] parameter(0)
      source = s32[1] parameter(1)
      ROOT r = f32[4] collective-broadcast(p, source), channel_id=1, replica_groups={{0,1}},
        has_dynamic_root=true, metadata={op_name="jit(f)/pbroadcast" source_file="/a/m/net.py"
        source_line=7}
    """
    )
    assert "collective-broadcast r (jit(f)/pbroadcast m/net.py:7) has groups" in message
    assert "its source is a traced value. Use a Python integer as the source" in message


_CALL = """
      p = f32[4] parameter(0)
      ROOT r = f32[4] custom-call(p), custom_call_target="%s", backend_config="%s",
        api_version=API_VERSION_TYPED_FFI,
        metadata={op_name="jit(f)/call" source_file="/a/m/net.py" source_line=3}
"""
_METADATA = "{kernel_hash = 1, uses_xla_collective_metadata = %s}"


@pytest.mark.parametrize(
    ("target", "attributes"),
    [
        ("thunky.inline_module", "{module = 1}"),
        ("mosaic_gpu_v2", _METADATA % "true"),
        ("mosaic_gpu_v2", "{module = nvshmem_ptr}"),
    ],
)
def test_custom_call_that_can_communicate_is_refused(target: str, attributes: str):
    message = _refused(_CALL % (target, attributes), _FOUR)
    assert f"{target} r (jit(f)/call m/net.py:3) is in a program over islands 0, 1" in message
    assert "Call it in a program for devices of one island" in message


def test_custom_call_that_can_communicate_is_left_alone_inside_an_island():
    body = hlo_text.entry(_CALL % ("thunky.inline_module", ""))
    assert decompose(hlo_text.module(body, [0, 1]), _FOUR, Options()) is None
    # XLA's autotuner compiles modules without a device assignment.
    assert decompose(hlo_text.module(body, []), _FOUR, Options()) is None


def test_other_custom_calls_are_left_alone():
    for target, text in (("mosaic_gpu_v2", _METADATA % "false"), ("my_kernel", "nvshmem")):
        data = hlo_text.module(hlo_text.entry(_CALL % (target, text)), [0, 1, 2, 3])
        assert decompose(data, _FOUR, Options()) is None
