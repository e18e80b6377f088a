"""Which network interfaces the transport socket takes, and which of two machines are joined."""

import ipaddress

import pytest

from jaxhet import _config
from jaxhet._errors import TransportError, UsageError
from jaxhet._net import interfaces as _interfaces
from jaxhet._net.interfaces import Interface


def _found(name: str, address: str, *, is_ordinary: bool = True, speed: int = 0) -> Interface:
    found = ipaddress.ip_interface(address)
    return Interface(name, found, is_ordinary=is_ordinary, speed=speed)


def _interface(name: str, address: str, *, is_named: bool = False) -> Interface:
    return Interface(name, ipaddress.ip_interface(address), is_named, 4000)


_LO = _found("lo", "127.0.0.1/8", is_ordinary=False)
_HOST = [
    _LO,
    _found("eth0", "10.0.0.1/24"),
    _found("eth0", "fd00::1/64"),
    _found("eth1", "10.0.1.1/24"),
]


def _names(interfaces: list[Interface]) -> list[str]:
    return [interface.name for interface in interfaces]


def test_own_interfaces_are_found() -> None:
    found = {entry.name: entry for entry in _interfaces.here() if entry.address.version == 4}
    assert str(found["lo"].address) == "127.0.0.1/8"
    assert not found["lo"].is_ordinary


def test_address_that_reaches_the_coordinator_is_the_first() -> None:
    assert _names(_interfaces.suitable(_HOST, "10.0.1.1")) == ["eth1", "eth0"]
    assert [str(i) for i in _interfaces.suitable(_HOST, "fd00::1")] == ["eth0 (fd00::1/64)"]


@pytest.mark.parametrize(
    "other",
    [
        _found("wg0", "10.8.0.1/24", is_ordinary=False),
        _found("public", "8.8.8.8/24"),
        _found("bmc", "169.254.0.2/16"),
        _found("slow", "10.0.2.1/24", speed=1_000),
    ],
    ids=lambda entry: entry.name,
)
def test_interface_that_is_not_suitable_is_left_out(other: Interface) -> None:
    fast = _found("fast", "10.0.3.1/24", speed=100_000)
    assert _names(_interfaces.suitable([*_HOST, fast, other], "10.0.0.1")) == [
        "eth0",
        "eth1",
        "fast",
    ]
    assert _names(_interfaces.named([other.name], [*_HOST, other])) == [other.name]


def test_names_and_networks_are_taken_in_their_order() -> None:
    wanted = ("10.0.1.0/24", "eth0")
    assert [str(i) for i in _interfaces.named(wanted, _HOST)] == [
        "eth1 (10.0.1.1/24)",
        "eth0 (10.0.0.1/24)",
        "eth0 (fd00::1/64)",
    ]
    assert all(interface.is_named for interface in _interfaces.named(wanted, _HOST))


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        (("eth",), ["eth0", "eth0", "eth1"]),
        (("=eth", "eth1"), None),
        (("=eth1",), ["eth1"]),
        (("^eth0",), ["eth1"]),
        (("^10.0.1.0/24", "lo"), ["eth0", "eth0"]),
        (("^eth",), None),
    ],
)
def test_interfaces_are_named_as_in_nccl(
    wanted: tuple[str, ...], selected: list[str] | None
) -> None:
    if selected is not None:
        assert _names(_interfaces.named(wanted, _HOST)) == selected
    else:
        with pytest.raises(UsageError, match="no interface of this machine"):
            _interfaces.named(wanted, _HOST)


@pytest.mark.parametrize("wanted", ["eth7", "10.9.0.0/16", "10.0.1.0/99"])
def test_interface_that_is_not_there_is_refused(wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        _interfaces.named((wanted,), _HOST)
    assert str(caught.value) == (
        "JAXHET_SOCKET_INTERFACES or NCCL_SOCKET_IFNAME: no interface of this machine that is up is"
        f" called, or has an address in, {wanted!r}; there are lo (127.0.0.1/8), eth0"
        " (10.0.0.1/24), eth0 (fd00::1/64), eth1 (10.0.1.1/24)"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"socket_address": "10.0.0.1"},
        {"socket_advertise": "nat:80"},
        {"transports": ("process_vm", "verbs")},
    ],
)
def test_address_that_the_user_chose_is_the_only_one(options: dict[str, object]) -> None:
    assert _interfaces.chosen(_config.resolve(options, {}), "10.0.0.1") == ()


def test_job_on_the_loopback_stays_there() -> None:
    assert _interfaces.chosen(_config.resolve({}, {}), "127.0.0.1") == ()
    named = _config.resolve({}, {"JAXHET_SOCKET_INTERFACES": "lo"})
    assert "lo" in _names(list(_interfaces.chosen(named, "127.0.0.1")))


def test_interfaces_of_one_network_are_joined() -> None:
    first = [_interface("eth0", "10.0.0.1/24"), _interface("eth1", "10.0.1.1/24")]
    second = [
        _interface("ens2", "10.0.1.2/24"),
        _interface("ens1", "10.0.0.2/24"),
        _interface("ens3", "10.0.3.2/24"),
    ]
    found = _interfaces.pairs(first, second)
    assert [(a.name, b.name) for a, b in found] == [("eth0", "ens1"), ("eth1", "ens2")]


def test_each_interface_of_a_shared_network_is_joined_once() -> None:
    first = [_interface(f"eth{i}", f"10.0.0.{i}/16") for i in (1, 2)]
    second = [_interface(f"eth{i}", f"10.0.1.{i}/16") for i in (1, 2, 3)]
    found = _interfaces.pairs(first, second)
    assert [(a.name, b.name) for a, b in found] == [("eth1", "eth1"), ("eth2", "eth2")]


def test_address_of_both_machines_joins_nobody() -> None:
    bridge = _interface("docker0", "172.17.0.1/16")
    first, second = _interface("eth0", "172.17.5.1/16"), _interface("eth0", "172.17.5.2/16")
    assert _interfaces.pairs([bridge, first], [bridge, second]) == [(first, second)]
    assert _interfaces.pairs([bridge, first], [bridge, first]) == []


def test_named_interfaces_of_other_networks_are_joined_in_their_order() -> None:
    first = [_interface(f"eth{i}", f"10.{i}.0.1/31", is_named=True) for i in (1, 2)]
    second = [_interface(f"ens{i}", f"10.{i}.9.1/31", is_named=True) for i in (1, 2)]
    found = _interfaces.pairs(first, second)
    assert [(a.name, b.name) for a, b in found] == [("eth1", "ens1"), ("eth2", "ens2")]
    unnamed = [_interface(i.name, str(i.address)) for i in second]
    assert _interfaces.pairs(first, unnamed) == []


@pytest.mark.parametrize("is_named", [False, True])
def test_claimed_interface_is_read_again(is_named: bool) -> None:
    for address in ("10.0.0.1/24", "fd00::1/64"):
        interface = _interface("eth0", address, is_named=is_named)
        assert Interface.parse(interface.announced()) == interface


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eth0",
        "eth0 10.0.0.1/24 named",
        "eth0 10.0.0.999/24 named 5",
        "eth0 10.0.0.1/24 other 5",
        "eth0 10.0.0.1/24 named 0",
        "eth0 10.0.0.1/24 named 65536",
        "eth0 10.0.0.1/24 named x",
    ],
)
def test_text_that_is_no_interface_is_refused(text: str) -> None:
    with pytest.raises(
        TransportError, match="of a process's description is not a network interface"
    ):
        Interface.parse(text)
