"""The rates of links, on machines that are not here."""

import ipaddress

import pytest

from jaxhet import _config
from jaxhet._doctor import links, peer
from jaxhet._doctor.nics import Choice
from jaxhet._net.interfaces import Found
from tests.python.inspect.trees import chosen

CONFIG = _config.resolve({}, {})


@pytest.mark.parametrize(("speed", "rate"), [(100_000, 12.5), (0, None)], ids=["known", "unknown"])
def test_socket_has_the_rate_of_the_way_to_the_peer(
    monkeypatch: pytest.MonkeyPatch, speed: int, rate: float | None
):
    own = Found("lo", ipaddress.ip_interface("127.0.0.1/8"), is_ordinary=False, speed=speed)
    other = Found("eth0", ipaddress.ip_interface("192.0.2.1/24"), is_ordinary=True, speed=1000)
    for module in (links, peer):
        monkeypatch.setattr(module, "here", lambda: [other, own])
    assert links.link_gb_per_s(CONFIG, "socket", "127.0.0.1:7000") == rate


def test_verbs_has_the_rate_of_all_nics_in_use(monkeypatch: pytest.MonkeyPatch):
    ports = [
        *chosen("mlx5_0").ports,
        *chosen("mlx5_1").ports,
        *chosen("mlx5_2", gbps=25.0, problem="25 Gbit/s are far below").ports,
    ]
    monkeypatch.setattr(links, "ask_transport", lambda _: Choice(ports))
    assert links.link_gb_per_s(CONFIG, "verbs", "10.1.0.9:7000") == 100


def test_other_transports_have_no_link():
    assert links.link_gb_per_s(CONFIG, "process_vm", "10.1.0.9:7000") is None


def test_name_that_nobody_knows_has_no_rate():
    assert links.link_gb_per_s(CONFIG, "socket", "no-such-host.invalid:7000") is None
