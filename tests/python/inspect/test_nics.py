"""NICs and the choice of a GID, on machines that are not here."""

import pathlib

import pytest

from jaxhet._inspect.nics import choose_gid, read_nics, roce_mtu
from jaxhet._inspect.report import Gid
from tests.python.inspect.trees import Tree


def test_no_nic_is_an_empty_list(tmp_path: pathlib.Path):
    assert read_nics(tmp_path) == ()


def test_infiniband_uses_the_ports_own_gid(tmp_path: pathlib.Path):
    Tree(tmp_path).infiniband_host()
    (nic,) = read_nics(tmp_path)
    (port,) = nic.ports
    assert (nic.name, nic.pci, nic.numa_node) == ("mlx5_0", "0000:01:00.0", 0)
    assert (nic.model, nic.firmware, nic.problem) == ("MT_0000000838", "28.39.2048", "")
    assert nic.device_file == "/dev/infiniband/uverbs0"
    assert (port.number, port.state, port.physical_state) == (1, "ACTIVE", "LinkUp")
    assert (port.link_layer, port.rate) == ("InfiniBand", "400 Gb/sec (4X NDR)")
    assert (port.gid_index, port.gid_reason) == (0, "InfiniBand: the port's own")
    assert [gid.address for gid in port.gids] == ["fe80::946d:ae03:aa:bbcc"]


def test_infinibands_mtu_is_what_pyverbs_says(tmp_path: pathlib.Path):
    Tree(tmp_path).infiniband_host()
    assert read_nics(tmp_path)[0].ports[0].active_mtu is None
    assert read_nics(tmp_path, "", {("mlx5_0", 1): 4096})[0].ports[0].active_mtu == 4096


def test_roce_uses_v2_with_the_ipv4_address(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (port,) = read_nics(tmp_path)[0].ports
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3, 4, 5]
    assert port.gids[5] == Gid(5, "::ffff:10.1.0.7", "RoCE v2", "ens1f0", True)
    assert (port.gid_index, port.gid_reason) == (5, "RoCE v2, IPv4, on ens1f0")
    assert port.active_mtu == 4096


def test_device_file_that_a_container_lacks_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert read_nics(tmp_path)[0].problem == (
        "/dev/infiniband/uverbs0 is not here; a container needs --device=/dev/infiniband"
    )


def test_nic_without_uverbs_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert "load its module ib_uverbs" in read_nics(tmp_path)[0].problem


def test_pci_address_of_a_device_below_the_pci_one(tmp_path: pathlib.Path):
    Tree(tmp_path).nic("rdma0", below="/auxiliary.roce.0")
    assert read_nics(tmp_path)[0].pci == "0000:01:00.0"


def test_iwarp_is_not_roce(tmp_path: pathlib.Path):
    tree = Tree(tmp_path)
    tree.nic("cxgb4_0")
    tree.file("sys/class/infiniband/cxgb4_0/node_type", "4: RNIC")
    assert read_nics(tmp_path)[0].problem.startswith("it is an iWARP NIC")


def test_other_link_layer_is_said():
    gid = Gid(0, "fe80::1", "IB/RoCE v1", "", False)
    assert choose_gid("Unspecified", [gid]) == (
        None,
        "its link layer is Unspecified; jaxhet uses InfiniBand and RoCE",
    )


def test_soft_roce_skips_the_link_local_gid(tmp_path: pathlib.Path):
    Tree(tmp_path).soft_roce_host()
    (nic,) = read_nics(tmp_path)
    assert (nic.pci, nic.numa_node, nic.model, nic.problem) == ("", -1, "rxe", "")
    (port,) = nic.ports
    assert (port.state, port.rate, port.active_mtu) == ("ACTIVE", "2.5 Gb/sec (1X SDR)", 4096)
    assert (port.gid_index, port.gid_reason) == (1, "RoCE v2, IPv4, on dummy")


def test_port_without_an_address_says_what_to_do(tmp_path: pathlib.Path):
    tree = Tree(tmp_path)
    tree.nic("mlx5_0")
    tree.port("mlx5_0", "Ethernet")
    (port,) = read_nics(tmp_path)[0].ports
    assert port.gid_reason.startswith("the port has no GID; bring its network device up")


V1 = Gid(0, "::ffff:10.1.0.7", "IB/RoCE v1", "a", True)
LOCAL = Gid(1, "fe80::1", "RoCE v2", "a", True)
V6 = Gid(2, "2001:db8::1", "RoCE v2", "a", True)
V4 = Gid(3, "::ffff:10.1.0.7", "RoCE v2", "a", True)
LATER = Gid(4, "::ffff:10.5.0.7", "RoCE v2", "a.5", True)
DOWN = Gid(5, "::ffff:10.1.0.8", "RoCE v2", "b", False)
ELSEWHERE = Gid(6, "::ffff:10.1.0.9", "RoCE v2", "", False)


@pytest.mark.parametrize(
    ("gids", "route", "index", "reason"),
    [
        ([V1], "", None, "no GID can be used: 0 is RoCE v1, which is not routed; give"),
        ([V1, LOCAL], "", None, "; 1 is link-local; give the port's network device an IPv4"),
        ([DOWN], "", None, "5 is on b, which is down"),
        ([ELSEWHERE], "", None, "6 has no network device here (another network namespace?)"),
        ([V1, LOCAL, V6], "", 2, "RoCE v2, global IPv6, on a"),
        ([V1, LOCAL, V6, V4, LATER, DOWN], "", 3, "RoCE v2, IPv4, on a"),
        ([V6, V4], "a", 3, "RoCE v2, IPv4, on a, the way to the peer"),
        ([V6, V4], "b", 3, "RoCE v2, IPv4, on a; the way to the peer is b"),
    ],
)
def test_choice_of_a_gid(gids: list[Gid], route: str, index: int | None, reason: str):
    found, why = choose_gid("Ethernet", gids, route)
    assert found == index
    assert reason in why


@pytest.mark.parametrize(
    ("netdev", "roce"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (300, None)]
)
def test_mtu_leaves_room_for_headers(netdev: int, roce: int | None):
    assert roce_mtu(netdev) == roce
