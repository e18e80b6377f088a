"""The rates of links, on machines that are not here."""

import pathlib

import pytest

from jaxhet import _config
from jaxhet._doctor import links
from jaxhet._doctor.nics import Choice
from tests.python.inspect.trees import ROUTES, Tree, chosen

CONFIG = _config.resolve({}, {})


@pytest.mark.parametrize(
    ("speed", "rate"), [("100000", 12.5), ("-1", None), ("", None)], ids=["known", "-1", "none"]
)
def test_tcp_has_the_rate_of_the_way_to_the_peer(
    tmp_path: pathlib.Path, speed: str, rate: float | None
):
    tree = Tree(tmp_path)
    tree.file("proc/net/route", ROUTES)
    tree.file("sys/class/net/ens1f0/speed", speed)
    tree.file("sys/class/net/eth0/speed", 1000)
    assert links.link_gb_per_s(tmp_path, CONFIG, "socket", "10.1.0.9:7000") == rate
    assert links.link_gb_per_s(tmp_path, CONFIG, "socket", "8.8.8.8:7000") == 0.125


def test_verbs_has_the_rate_of_all_nics_in_use(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    ports = [
        *chosen("mlx5_0").ports,
        *chosen("mlx5_1").ports,
        *chosen("mlx5_2", gbps=25.0, problem="25 Gbit/s are far below").ports,
    ]
    monkeypatch.setattr(links, "ask_transport", lambda _: Choice(ports))
    assert links.link_gb_per_s(tmp_path, CONFIG, "verbs", "10.1.0.9:7000") == 100


def test_other_transports_have_no_link(tmp_path: pathlib.Path):
    assert links.link_gb_per_s(tmp_path, CONFIG, "process_vm", "10.1.0.9:7000") is None


def test_name_that_nobody_knows_has_no_rate(tmp_path: pathlib.Path):
    assert links.link_gb_per_s(tmp_path, CONFIG, "socket", "no-such-host.invalid:7000") is None
