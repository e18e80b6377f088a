"""Two islands in two guests: JAX, FFI, engine and soft-RoCE."""

import re
import shlex

import pytest

from tests.rdma_vm.guest import Ended, Guest
from tests.support.scripts import job
from tests.support.two_hosts import expected

pytestmark = pytest.mark.early

_LINE = re.compile(r"(?:^|AssertionError: )(ok|FAIL) (\S+)", re.MULTILINE)
_KINDS = {"sum", "gather", "permute", "all_to_all"}
_COMMAND = ".venv/bin/python -m tests.rdma_vm.islands"
_PORT = 7000
_TIMEOUT_S = 800
_PACKETS = 8 << 20 >> 12  # at least the bytes of the largest exchange


def _envs(address: str) -> list[dict[str, str]]:
    """Output of both processes; emulation is slow."""
    return job(
        2,
        JAXHET_TRANSPORTS="verbs",
        JAXHET_COORDINATOR_ADDRESS=f"{address}:{_PORT}",
        JAXHET_CONNECT_TIMEOUT_S="300",
        JAXHET_PEER_TIMEOUT_S="60",
    )


def _check(ended: Ended, subtests: pytest.Subtests) -> None:
    results = _LINE.findall(ended.text)
    for result, name in results:
        with subtests.test(name):
            assert result == "ok", ended.text
    assert ended.code == 0, ended.text
    assert {name.partition("-")[0] for _, name in results} == _KINDS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_islands_in_two_guests(pair: tuple[Guest, Guest], subtests: pytest.Subtests):
    packets = [guest.packets() for guest in pair]
    envs = _envs(pair[0].address)
    names = [guest.start(_COMMAND, env) for guest, env in zip(pair, envs, strict=True)]
    for guest, name, before in zip(pair, names, packets, strict=True):
        _check(guest.wait(name, _TIMEOUT_S), subtests)
        assert guest.packets() > before + _PACKETS


_TRAIN = "from tests.support.two_hosts import PROGRAM; exec(PROGRAM)"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_guests_train_as_one_program(pair: tuple[Guest, Guest]):
    """The program of tests/multiprocess/test_ssh.py, over soft-RoCE."""
    packets = [guest.packets() for guest in pair]
    command = f".venv/bin/python -c {shlex.quote(_TRAIN)}"
    # The program's messages are short; eager ones travel on the control connection.
    options = {"JAXHET_CPU_DEVICES": "2", "JAXHET__EAGER_BYTES": "0"}
    envs = [{**env, **options} for env in _envs(pair[0].address)]
    names = [guest.start(command, env) for guest, env in zip(pair, envs, strict=True)]
    for guest, name, before in zip(pair, names, packets, strict=True):
        ended = guest.wait(name, 1400)
        assert ended.code == 0, ended.text
        found = re.search(r"^loss (\S+) 2 4 \['verbs'\]$", ended.text, re.MULTILINE)
        assert found, ended.text
        assert abs(float(found[1]) - expected()) < 1e-6
        assert guest.packets() > before
