"""Jobs whose data would cross a public network without protection."""

import dataclasses
import warnings

import pytest

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import exposure
from jaxhet._job.process_info import ProcessInfo
from tests.support.damage import process_info_of

_HERE = ProcessInfo.from_json(process_info_of(0))


def _there(address: str, **changes: object) -> ProcessInfo:
    other = {**process_info_of(1), "host_id": "another", "interfaces": (), **changes}
    return ProcessInfo.from_json({**other, "address": address})


def _check(*members: ProcessInfo, coordinator: str = "", **options: str) -> None:
    exposure.check(_config.resolve(options, {}), 0, (_HERE, *members), coordinator)


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "[2001:4860:4860::8888]", "[::ffff:8.8.8.8]"], ids=["4", "6", "mapped"]
)
def test_public_peer_is_refused_without_encryption(host: str) -> None:
    peer = _there(f"{host}:7000")
    words = (
        r"unprotected to \S*8, which is an address of the internet: set JAXHET_ENCRYPTION=full \(or"
        r" auth.*or JAXHET_ENCRYPTION=off, if a VPN"
    )
    with pytest.raises(UsageError, match=words):
        _check(peer)
    _check(peer, encryption="auth")
    _check(peer, encryption="full")


def test_public_coordinator_and_interface_are_refused() -> None:
    peer = _there("10.0.0.2:7000")
    with pytest.raises(UsageError, match=r"unprotected to 8\.8\.4\.4, which"):
        _check(peer, coordinator="8.8.4.4")
    with pytest.raises(UsageError, match=r"unprotected to 9\.9\.9\.9, which"):
        _check(_there("10.0.0.2:7000", interfaces=("eth1 9.9.9.9/24 named 7000",)))


def test_off_by_the_users_will_is_a_warning() -> None:
    peer = _there("8.8.8.8:7000")
    with pytest.warns(UserWarning, match=r"8\.8\.4\.4.*because JAXHET_ENCRYPTION is off") as told:
        _check(peer, coordinator="8.8.4.4", encryption="off")
    assert len(told) == 1  # however many addresses
    config = _config.resolve({}, {"JAXHET_ENCRYPTION": "off"})
    with pytest.warns(UserWarning, match=r"8\.8\.8\.8.*because JAXHET_ENCRYPTION is off"):
        exposure.check(config, 0, (_HERE, peer), "")


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "127.0.0.1", "192.168.0.9", "100.64.0.1", "169.254.0.9", "[fd00::1]"]
)
def test_private_networks_are_no_problem(host: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(_there(f"{host}:7000"), coordinator=host.strip("[]"))


def test_public_address_of_the_own_host_is_no_problem() -> None:
    other = dataclasses.replace(_there("8.8.8.8:7000"), host_id=_HERE.host_id)
    _check(other)


def test_name_that_nobody_knows_is_left_to_the_connection() -> None:
    _check(_there("no-such-host.invalid:7000"))
