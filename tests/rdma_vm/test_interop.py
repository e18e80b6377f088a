"""Our queue pairs talk to a peer that was written with pyverbs, and to ourselves."""

import json

import pytest

from tests.rdma_vm.guest import REAL_VERBS, Guest
from tools.programs import build

pytestmark = pytest.mark.early

_PEER = "/usr/bin/python3 tests/rdma_vm/pyverbs_peer.py"
_DOCTOR = ".venv/bin/python -m jaxhet.cli doctor --json 2>/dev/null"
_PEERS_CHUNK = 100_000
_CHUNK = 512 << 10
_LARGEST_MESSAGE = 8 << 20  # soft-RoCE's limit


@pytest.mark.parametrize(
    "num_bytes",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7, _PEERS_CHUNK - 1, _PEERS_CHUNK)),
        _PEERS_CHUNK + 1,
        3_000_001,
    ],
)
def test_pyverbs_peer_understands_us(num_bytes: int, guest: Guest):
    bench = build("verbs_peer_bench")
    ended = guest.run(f"{_PEER} {bench} {num_bytes} 4", 240, REAL_VERBS)
    assert ended.code == 0, ended.text
    assert ended.text == f"4 messages of {num_bytes} bytes each way\n"


@pytest.mark.slow  # emulation of the doctor takes two minutes
def test_pyverbs_sees_the_nic_as_we_do(guest: Guest):
    ended = guest.run(_DOCTOR, 240, REAL_VERBS)
    report = json.loads(ended.text)
    assert report["software"]["pyverbs"]["text"] == "of /usr/bin/python3, which sees 1 NIC"
    assert [nic["name"] for nic in report["nics"]] == ["rxe0"]
    assert not [finding for finding in report["findings"] if "pyverbs" in finding["text"]]


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [
        *(pytest.param(_CHUNK + d, _CHUNK, marks=pytest.mark.slow) for d in (-1, 0)),
        (_CHUNK + 1, _CHUNK),
        *(pytest.param(_LARGEST_MESSAGE + d, _CHUNK, marks=pytest.mark.slow) for d in (-1, 0, 1)),
        # A chunk and its header of 64 bytes fit the largest message that the NIC can take.
        pytest.param(_LARGEST_MESSAGE - 64, 2 * _LARGEST_MESSAGE, marks=pytest.mark.slow),
        (_LARGEST_MESSAGE - 63, 2 * _LARGEST_MESSAGE),
    ],
)
def test_messages_around_the_limits_arrive(num_bytes: int, chunk_bytes: int, guest: Guest):
    packets = guest.packets()
    bench = build("verbs_peer_bench")
    ended = guest.run(f"{bench} {num_bytes} 3 {chunk_bytes}", 240, REAL_VERBS)
    assert ended.code == 0, ended.text
    assert guest.packets() - packets >= 6 * (num_bytes // 4096)
