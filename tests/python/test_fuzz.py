"""Messages of peers, damaged at random: all are refused in words, also in threads.

The engine's parsers have fuzzers of their own (`tests/cpp/fuzz.h`); a test here fails for a file
that parses what peers send and that no fuzzer names. FUZZ_SECONDS and FUZZ_SEED as there.
"""

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxhet import _bootstrap, _config, _handshake, _initialize, _membership
from jaxhet._channel import Channel
from jaxhet._claim import Claim, disagreement
from jaxhet._errors import JaxhetError, TransportError

_ROOT = pathlib.Path(__file__).parents[2]
_SECRET = b"a job secret of 32 random bytes."
_SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.3"))
_SEED = int(os.environ.get("FUZZ_SEED", "1"))
_OURS = _handshake.Keys(send=bytes(32), receive=bytes(31) + b"1")
_THEIRS = _handshake.Keys(send=_OURS.receive, receive=_OURS.send)
_NUMBERS = (0, 1, -1, 255, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"))
_VALUES = (*_NUMBERS, None, True, "", "x", "\0", "\ud800", [], {}, [[]], ["x"], {"x": "x"})

# Files of jaxhet that read messages of peers, by the test that damages these.
_FUZZED = {
    "jaxhet/_handshake.py": "test_damaged_handshakes_are_refused",
    "jaxhet/_channel.py": "test_damaged_messages_are_refused",
    "jaxhet/_bootstrap.py": "test_damaged_headers_are_refused",
    "jaxhet/_coordinator.py": "test_damaged_claims_are_refused",
    "jaxhet/_membership.py": "test_damaged_answers_of_the_coordinator_are_refused",
}
# Patterns of code in Python, and in C++, that reads bytes of peers.
_READS_PYTHON = re.compile(r"channel\.receive\(|\breceive_exactly\(|\b_HEADER\.unpack\(")
_READS_CPP = re.compile(
    r"\bTake(?:Info)?<\w+>\(|\bUnpackStrings\(|memcpy\(&\w+, "
    r"(?:offer|answer|message|text|body|beside|CMSG_DATA|memory)\b|\brecvmsg\("
    r"|\bRead\(socket, &|arrived_note\("
)
# Their headers are written into memory by a NIC that holds our key, after an authenticated set-up;
# tests/softverbs damages what NICs do.
_BY_NIC = {"xla_plugin/transport/verbs/connection.cc", "xla_plugin/transport/verbs/verbs_ring.cc"}
_NOT_OF_PEERS = {"xla_plugin/transport/socket.cc"}  # moves bytes and reads none


def _inputs(seeds: list[Any], damage: Callable[[Any, random.Random], Any]) -> Iterator[Any]:
    """Damaged copies of the seeds, for as long as a fuzzer has; a failure shows the seed."""
    deadline = time.monotonic() + _SECONDS
    count = 0
    while time.monotonic() < deadline or count < 20:
        chosen = random.Random(_SEED + count)
        yield damage(copy.deepcopy(chosen.choice(seeds)), chosen)
        count += 1
    print(f"{count} executions")


def _damage_bytes(data: bytes, chosen: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chosen.randint(1, 4)):
        at = chosen.randrange(len(changed) + 1)
        match chosen.randrange(4):
            case 0:
                del changed[at : at + chosen.randrange(24)]
            case 1:
                changed[at:at] = chosen.randbytes(chosen.randrange(24))
            case 2:
                changed[at : at + 4] = chosen.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
            case _:
                changed[at : at + 1] = chosen.randbytes(1)
    return bytes(changed)


def _damage_json(value: Any, chosen: random.Random) -> Any:
    """Replaces, removes or adds something at a random place."""
    if isinstance(value, dict) and value and chosen.random() < 0.9:
        name = chosen.choice(list(value))
        match chosen.randrange(6):
            case 0:
                del value[name]
            case 1:
                value[chosen.choice(("", "x", name + "x"))] = value[name]
            case _:
                value[name] = _damage_json(value[name], chosen)
        return value
    if isinstance(value, list) and value and chosen.random() < 0.7:
        i = chosen.randrange(len(value))
        value[i] = _damage_json(value[i], chosen)
        return value
    return chosen.choice(_VALUES)


@contextlib.contextmanager
def _said(message: Any) -> Iterator[tuple[socket.socket, Channel]]:
    """A socket on which a peer has said this, and then no more; and our channel of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(theirs, _THEIRS).send(message)
        theirs.shutdown(socket.SHUT_WR)
        yield ours, Channel(ours, _OURS)


@contextlib.contextmanager
def _received(data: bytes) -> Iterator[socket.socket]:
    """A socket on which these bytes have come, and then the end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours


def _claim(process: int) -> dict[str, Any]:
    given = {"process_id": process, "num_processes": 2, "island": f"island{process}"}
    claim = _initialize.make_claim(_config.resolve(given, {}), f"127.0.0.1:{9000 + process}")
    return json.loads(json.dumps(dataclasses.asdict(claim)))


def test_damaged_handshakes_are_refused() -> None:
    header = _membership.HEADER
    good = bytes(_handshake.NONCE_BYTES) + header + bytes(_handshake.MAC_BYTES)
    for data in _inputs([good], _damage_bytes):
        with _received(data) as sock, pytest.raises(JaxhetError):
            _handshake.accept(sock, _SECRET, len(header))
        with _received(data) as sock, pytest.raises(JaxhetError):
            _handshake.connect(sock, _SECRET, header)


def test_damaged_messages_are_refused() -> None:
    message = {"claim": _claim(0)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(theirs, _THEIRS).send(message)
        sealed = ours.recv(1 << 20)
    for data in _inputs([sealed], _damage_bytes):
        with _received(data) as sock:
            if data[: len(sealed)] == sealed:
                assert Channel(sock, _OURS).receive(5) == message
            else:
                with pytest.raises(TransportError):
                    Channel(sock, _OURS).receive(5)


def test_message_that_is_no_json_is_refused() -> None:
    def send(text: bytes, sock: socket.socket) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda message: text.decode("latin-1"))
            Channel(sock, _THEIRS).send(None)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for text in (b"{", b"\xff\xfe", b"[" * 100_000):
            send(text, theirs)
            with pytest.raises(TransportError, match="a message that is no JSON"):
                Channel(ours, _OURS).receive(5)


def test_damaged_headers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _bootstrap.Listener("127.0.0.1", 0, 1, _SECRET)
    good = _bootstrap._HEADER.pack(_bootstrap._MAGIC, _bootstrap._VERSION, 3, 2, 1)
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(listener):
        for header in _inputs([good], _damage_bytes):
            padded = header[: len(good)].ljust(len(good), b"\0")
            monkeypatch.setattr(_handshake, "accept", lambda *_, padded=padded: (padded, _OURS))
            if padded[:10] == good[:10] and padded[-4:] == good[-4:]:
                assert isinstance(listener._authenticate(ours), tuple)
            else:
                with pytest.raises(JaxhetError, match="meant for another process"):
                    listener._authenticate(ours)


def test_damaged_claims_are_refused() -> None:
    def come(message: Any) -> None:
        claim = Claim.from_json(message)
        disagreement(claim, Claim.from_json(_claim(1)))
        assert str(claim).startswith("process ")

    for message in _inputs([_claim(0), _claim(1)], _damage_json):
        with contextlib.suppress(JaxhetError):
            come(message)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Claim)])
def test_claim_without_a_field_is_refused(field: str) -> None:
    fields = _claim(0)
    wrong = 1.5
    with pytest.raises(JaxhetError, match=f"{field} of a claim is 1.5, which is no "):
        Claim.from_json({**fields, field: wrong})
    del fields[field]
    with pytest.raises(JaxhetError, match="the fields of a claim are not process, "):
        Claim.from_json(fields)


def test_damaged_answers_of_the_coordinator_are_refused() -> None:
    members = [_claim(0), _claim(1)]
    good = {"members": members, "process": 0, "service": "127.0.0.1:9", "certificate": None}
    seeds = [good, {"error": ["UsageError", "no"]}, {"event": {"text": "gone", "kind": "gone"}}]
    claim = Claim.from_json(members[0])
    for message in _inputs(seeds, _damage_json):
        with _said(message) as (sock, channel):
            membership = _membership.Membership(sock, channel, _SECRET)
            membership._closing = True  # the end of the input is no news
            given = object.__new__(_membership.Credentials)
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(JaxhetError):
                patch.setattr(_membership._credentials, "check_service", lambda *_: None)
                membership.join(claim, 5, given)
                assert [member.process for member in membership.members] == [0, 1]
            sock.close()


def test_damaged_news_of_the_coordinator_are_heard() -> None:
    seeds = [
        {"event": {"kind": "gone", "process": 1, "text": "process 1 is gone"}},
        {"error": ["PeerError", "smoke"]},
        {"tuned": {"to": [0], "program": "p", "files": {}}},
    ]
    for message in _inputs(seeds, _damage_json):
        with _said(message) as (sock, channel):
            membership = _membership.Membership(sock, channel, _SECRET)
            membership._follow()  # returns: its thread ends with an error for the program
            assert isinstance(membership.failure, JaxhetError), message


def test_every_parser_of_what_peers_send_has_a_fuzzer() -> None:
    python = {
        path.relative_to(_ROOT).as_posix()
        for path in (_ROOT / "jaxhet").rglob("*.py")
        if _READS_PYTHON.search(path.read_text())
    }
    assert python == set(_FUZZED), "give these files a test here, and a row in _FUZZED"
    assert set(_FUZZED.values()) <= set(globals())
    cpp = {
        path.relative_to(_ROOT).as_posix()
        for path in (_ROOT / "xla_plugin").rglob("*.cc")
        if _READS_CPP.search(path.read_text())
    }
    texts = [path.read_text() for path in (_ROOT / "tests" / "cpp").glob("fuzz_*_test.cc")]
    fuzzed = set(re.findall(r'"(xla_plugin/[\w/.]+)"', "".join(texts)))
    assert cpp, "the pattern finds no parser"
    missing = cpp - fuzzed - _BY_NIC - _NOT_OF_PEERS
    assert not missing, "name these files in `covers` of a fuzzer that reaches their parsers"
    assert all((_ROOT / name).exists() for name in fuzzed)
