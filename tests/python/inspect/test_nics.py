"""NICs on machines that are not here, and what the verbs transport says of them."""

import pathlib
from typing import Any

import pytest

from jaxhet import _config, _ffi
from jaxhet._doctor.nics import Choice, ask_transport, read_nics
from jaxhet._doctor.report import Gid
from jaxhet._errors import TransportError, UsageError
from tests.python.inspect.trees import Tree, chosen


def test_no_nic_is_an_empty_list(tmp_path: pathlib.Path):
    assert read_nics(tmp_path, Choice(())) == ()


def test_infiniband_needs_no_gid(tmp_path: pathlib.Path):
    Tree(tmp_path).infiniband_host()
    (nic,) = read_nics(tmp_path, chosen("mlx5_0", gid_index=None, reason="InfiniBand, by LID 7"))
    (port,) = nic.ports
    assert (nic.name, nic.problem) == ("mlx5_0", "")
    assert (port.number, port.state, port.physical_state) == (1, "ACTIVE", "LinkUp")
    assert (port.link_layer, port.rate) == ("InfiniBand", "400 Gb/sec (4X NDR)")
    assert (port.gid_index, port.gid_reason, port.problem) == (None, "InfiniBand, by LID 7", "")
    assert port.active_mtu == 4096
    assert [gid.address for gid in port.gids] == ["fe80::946d:ae03:aa:bbcc"]


def test_roce_shows_all_gids_and_the_transports_choice(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (nic,) = read_nics(tmp_path, chosen("mlx5_0"))
    (port,) = nic.ports
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3, 4, 5]
    assert port.gids[5] == Gid(5, "::ffff:10.1.0.7", "RoCE v2", "ens1f0")
    assert (port.gid_index, port.gid_reason) == (5, "RoCE v2, IPv4, on ens1f0")
    assert (port.active_mtu, port.problem, nic.problem) == (4096, "", "")


def test_without_libibverbs_nothing_is_chosen(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (nic,) = read_nics(tmp_path, Choice((), "dlopen: libibverbs.so.1: cannot open"))
    (port,) = nic.ports
    assert (port.gid_index, port.active_mtu) == (None, None)
    assert port.gid_reason == "not chosen: dlopen: libibverbs.so.1: cannot open"
    assert (nic.problem, port.problem, len(port.gids)) == ("", "", 6)


def test_port_that_is_left_out_says_why(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (nic,) = read_nics(tmp_path, chosen("mlx5_0", problem="not in JAXHET_VERBS_DEVICES"))
    assert nic.ports[0].problem == "not in JAXHET_VERBS_DEVICES"
    assert (nic.problem, nic.ports[0].gid_index) == ("", 5)


def test_nic_that_libibverbs_does_not_know_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (nic,) = read_nics(tmp_path, chosen("mlx5_1"))
    assert nic.problem.startswith("libibverbs does not know it: install its provider")


def test_nic_that_cannot_be_opened_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    closed = chosen("mlx5_0", port=0, gid_index=None, reason="", problem="ibv_open_device: EIO (5)")
    (nic,) = read_nics(tmp_path, closed)
    assert (nic.problem, nic.ports[0].gid_index) == ("ibv_open_device: EIO (5)", None)


def test_transport_is_asked_with_the_options(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def nics(config: _config.Config) -> list[dict[str, Any]]:
        asked.append((config.verbs_gid_index, config.verbs_devices))
        raise TransportError("there is no RDMA NIC")

    monkeypatch.setattr(_ffi, "nics", nics)
    environ = {"JAXHET_VERBS_GID_INDEX": "3", "JAXHET_VERBS_DEVICES": "mlx5_0"}
    choice = ask_transport(_config.resolve({}, environ))
    assert asked == [(3, ("mlx5_0",))]
    assert choice == Choice((), "there is no RDMA NIC")


def test_options_of_the_transport_are_checked():
    with pytest.raises(UsageError, match="verbs_service_level=99 is above the maximum, 15"):
        ask_transport(_config.resolve({"verbs_service_level": 99}))


def test_device_file_that_a_container_lacks_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert read_nics(tmp_path, Choice(()))[0].problem == (
        "/dev/infiniband/uverbs0 is not here; a container needs --device=/dev/infiniband"
    )


def test_nic_without_uverbs_is_said(tmp_path: pathlib.Path):
    Tree(tmp_path).roce_host()
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert "load its module ib_uverbs" in read_nics(tmp_path, Choice(()))[0].problem


def test_iwarp_is_not_roce(tmp_path: pathlib.Path):
    tree = Tree(tmp_path)
    tree.nic("cxgb4_0")
    tree.file("sys/class/infiniband/cxgb4_0/node_type", "4: RNIC")
    assert read_nics(tmp_path, Choice(()))[0].problem.startswith("it is an iWARP NIC")
