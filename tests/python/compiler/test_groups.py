"""Replica groups in all forms, and how islands divide them."""

import pytest

from jaxhet._errors import UsageError
from jaxhet.compiler import collectives, groups, hlo
from jaxhet.compiler.groups import AxisRef
from tests.python.compiler import hlo_text


def test_iota_groups_transposed():
    assert groups.iota_groups(2, [2, 2], [1, 0]) == ((0, 2), (1, 3))
    assert groups.iota_groups(4, [2, 2, 2], [2, 0, 1]) == ((0, 2), (4, 6), (1, 3), (5, 7))


@pytest.mark.parametrize(
    ("refs", "expected"),
    [
        ([AxisRef(0)], ((0, 4), (1, 5), (2, 6), (3, 7))),
        ([AxisRef(1)], ((0, 1, 2, 3), (4, 5, 6, 7))),
        ([AxisRef(0), AxisRef(1)], (tuple(range(8)),)),
        ([AxisRef(1), AxisRef(0)], ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ([AxisRef(1, 1, 2)], ((0, 2), (1, 3), (4, 6), (5, 7))),
        ([AxisRef(1, 2, 2)], ((0, 1), (2, 3), (4, 5), (6, 7))),
        ([AxisRef(1, 2, 2), AxisRef(0)], ((0, 4, 1, 5), (2, 6, 3, 7))),
    ],
)
def test_mesh_groups_of_axes_and_sub_axes(refs: list[AxisRef], expected: groups.Groups):
    assert groups.mesh_groups([2, 4], [], refs) == expected


def test_mesh_groups_with_device_order():
    assert groups.mesh_groups([2, 2], [3, 1, 2, 0], [AxisRef(1)]) == ((3, 1), (2, 0))


@pytest.mark.parametrize(
    ("text", "assigned", "ranks"),
    [
        ("{{0,2},{1,3}}", [0, 1, 2, 3], ((0, 2), (1, 3))),
        ("[2,2]<=[2,2]T(1,0)", [0, 1, 2, 3], ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", [0, 1, 2, 3], ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(1)2}", [0, 1, 2, 3], ((0, 2), (1, 3))),
        ("{{0,1},{2,3}}", [3, 0, 2, 1], ((3, 0), (2, 1))),
    ],
)
def test_groups_of_each_form_are_ranks_of_the_device_assignment(
    text: str, assigned: list[int], ranks: groups.Groups
):
    body = f"""
      p = f32[4] parameter(0)
      ROOT {hlo_text.all_reduce("r", "p", text)}
    """
    module = hlo.Module(hlo_text.module(hlo_text.entry(body), assigned))
    (found,) = collectives.crossing(module, hlo_text.job(0, 0, 1, 1))
    assert found.ranks == ranks


def test_groups_without_a_list_are_all_devices():
    body = """
      p = f32[4] parameter(0)
      ROOT r = f32[4] all-reduce(p), channel_id=1, replica_groups={}, to_apply=sum
    """
    module = hlo.Module(hlo_text.module(hlo_text.entry(body), [0, 1, 2]))
    (found,) = collectives.crossing(module, hlo_text.job(0, 0, 1))
    assert found.groups == ((0, 1, 2),)


def test_several_replicas_are_refused():
    body = f"""
      p = f32[4] parameter(0)
      ROOT {hlo_text.all_reduce("r", "p")}
    """
    module = hlo.Module(hlo_text.module(hlo_text.entry(body), [0, 1]))
    module.proto.device_assignment.replica_count = 2
    with pytest.raises(UsageError, match="test has 2 replicas; JAX's programs have one"):
        collectives.crossing(module, hlo_text.job(0, 1))


def test_split_keeps_group_order_within_islands_and_orders_islands():
    split = groups.split(((3, 0, 2, 1),), [0, 1, 2, 3], [1, 1, 0, 0])
    assert split == groups.Split(
        local=((3, 2), (0, 1)),
        rails=((3, 0), (2, 1)),
        places=((0, 0), (1, 0), (0, 1), (1, 1)),
    )


@pytest.mark.parametrize("islands", [(0, 0, 0, 1), (0, 1, 2, 2)])
def test_split_of_unequal_islands_says_why_not(islands):
    reason = groups.split(((0, 1, 2, 3),), range(4), islands)
    assert isinstance(reason, str)
    assert reason.startswith("islands have different numbers of members: ")


def test_split_of_unlike_groups_says_why_not():
    reason = groups.split(((0, 1), (2, 3)), range(4), (0, 0, 0, 1))
    assert reason == "groups have different members per island: 1+1, 2"


def test_groups_of_unequal_size_fit_into_groups_of_all_logical_ids():
    assert groups.covering(((0, 1, 2), (3,)), 4) == ((0, 1, 2, 3),)
    assert groups.covering(((0, 3), (1,), (2,), (4,), (5,)), 6) == ((0, 1), (2, 3), (4, 5))
    assert groups.covering(((3, 0), (2, 1)), 4) == ((3, 0), (2, 1))


def test_padded_groups_say_where_their_members_end():
    assert groups.padded(((3, 0, 1), (2,)), 4) == (3, 0, 1, -1, 2, -1, -1, -1)
    assert groups.padded(((3, 0), (2, 1)), 2) == (3, 0, 2, 1)


def test_split_has_no_places_where_groups_meet_the_islands_in_different_orders():
    split = groups.split(((0, 2), (3, 1)), [0, 1, 2, 3], [0, 0, 1, 1])
    assert isinstance(split, groups.Split)
    assert split.rails == ((0, 2), (1, 3))
    assert split.places is None
