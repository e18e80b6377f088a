"""Two islands of one CPU rank each, in one guest or in two: JAX, FFI, engine and transport."""

import re

import pytest

from tests.rdma_vm.guest import Ended, Guest
from tests.support.scripts import job

_LINE = re.compile(r"^(ok|FAIL) (\S+)", re.MULTILINE)
_COMMAND = ".venv/bin/python -m tests.rdma_vm.islands"
_TIMEOUT_S = 600


def _envs(transport: str, address: str) -> list[dict[str, str]]:
    """Of both processes; emulation is slow."""
    port = 7000
    return job(
        2,
        JAXHET_TRANSPORTS=transport,
        JAXHET_COORDINATOR_ADDRESS=f"{address}:{port}",
        JAXHET_CONNECT_TIMEOUT_S="300",
        JAXHET_PEER_TIMEOUT_S="60",
    )


def _check(ended: Ended, subtests: pytest.Subtests) -> None:
    results = _LINE.findall(ended.text)
    for result, name in results:
        with subtests.test(name):
            assert result == "ok", ended.text
    assert ended.code == 0, ended.text
    assert {name.partition("-")[0] for _, name in results} == {
        "psum",
        "all_gather",
        "permute",
        "all_to_all",
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp"])
def test_islands_in_one_guest(transport: str, guest: Guest, subtests: pytest.Subtests):
    first, second = _envs(transport, guest.address)
    exports = " ".join(f"{key}='{value}'" for key, value in second.items())
    script = f"({exports} {_COMMAND} >/tmp/second 2>&1 || cat /tmp/second) & {_COMMAND} && wait $!"
    _check(guest.run(script, _TIMEOUT_S, first), subtests)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp"])
def test_islands_in_two_guests(
    transport: str, pair: tuple[Guest, Guest], subtests: pytest.Subtests
):
    envs = _envs(transport, pair[0].address)
    names = [guest.start(_COMMAND, env) for guest, env in zip(pair, envs, strict=True)]
    for guest, name in zip(pair, names, strict=True):
        _check(guest.wait(name, _TIMEOUT_S), subtests)
