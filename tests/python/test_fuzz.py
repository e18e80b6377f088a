"""Messages of peers, damaged at random: all are refused in words, also in threads.

The engine's parsers have fuzzers of their own (`tests/cpp/fuzz.h`); a test here fails for a file
that parses what peers send and that no fuzzer names. `tests/support/damage.py` makes the inputs;
`sh tools/fuzz_coverage.sh` says which lines of the parsers they reach.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import socket
from typing import Any

import pytest

from jaxhet._errors import JaxhetError, TransportError
from jaxhet._job import listener as _listener
from jaxhet._job import membership as _membership
from jaxhet._job.process_info import JOB_BYTES, ProcessInfo, disagreement
from jaxhet._net import handshake
from jaxhet._net.certificates import Authority, Identity
from jaxhet._net.channel import Channel
from tests.support.damage import (
    OURS,
    THEIRS,
    damage_bytes,
    damage_json,
    inputs,
    process_info_of,
    received,
    said,
)
from tools import fuzz_coverage

_ROOT = pathlib.Path(__file__).parents[2]
_SECRET = b"a job secret of 32 random bytes."

# Files of jaxhet that read messages of peers, by the test that damages these.
_FUZZED = {
    "jaxhet/_net/handshake.py": "test_damaged_handshakes_are_refused",
    "jaxhet/_net/channel.py": "test_damaged_messages_are_refused",
    "jaxhet/_job/listener.py": "test_damaged_headers_are_refused",
    "jaxhet/_job/coordinator.py": "test_damaged_process_infos_are_refused",
    "jaxhet/_job/membership.py": "test_damaged_answers_of_the_coordinator_are_refused",
}
# Patterns of code in Python, and in C++, that reads bytes of peers.
_READS_PYTHON = re.compile(r"channel\.receive\(|\breceive_exactly\(|\b_(HEADER|ANSWER)\.unpack\(")
_READS_CPP = re.compile(
    r"\bTake(?:Info)?<\w+>\(|\bUnpackStrings\(|memcpy\(&\w+, "
    r"(?:offer|answer|message|text|body|beside|CMSG_DATA|memory)\b|\brecvmsg\("
    r"|\bRead\(socket, &|arrived_header\("
)
_COVERED = re.compile(r'(?<!#include )"(xla_plugin/[\w/.]+)"')


def test_damaged_handshakes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    header = _membership.HEADER
    monkeypatch.setattr(handshake.secrets, "token_bytes", bytes)
    nonce = handshake._new_nonce()  # both ends have this one
    mac, answer = functools.partial(handshake._mac, _SECRET), b"answer"
    to_acceptor = nonce + header + mac(b"connect", nonce, nonce, header)
    to_connector = nonce + answer + mac(b"accept", nonce, nonce, header + answer)
    for data in inputs([to_acceptor, to_connector], damage_bytes):
        with received(data) as sock, _expect(data.startswith(to_acceptor)):
            assert handshake.accept(sock, _SECRET, len(header))[0] == header
        with received(data) as sock, _expect(data.startswith(to_connector)):
            assert handshake.connect(sock, _SECRET, header, len(answer))[0] == answer


def _expect(is_sound: bool) -> contextlib.AbstractContextManager[object]:
    """Expects success, or else an error of ours."""
    return contextlib.nullcontext() if is_sound else pytest.raises(JaxhetError)


def test_damaged_messages_are_refused() -> None:
    message = {"process_info": process_info_of(0)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(theirs, THEIRS).send(message)
        sealed = ours.recv(1 << 20)
    for data in inputs([sealed], damage_bytes):
        with received(data) as sock:
            if data[: len(sealed)] == sealed:
                assert Channel(sock, OURS).receive(5) == message
            else:
                with pytest.raises(TransportError):
                    Channel(sock, OURS).receive(5)


def test_message_that_is_no_json_is_refused() -> None:
    def send(text: bytes, sock: socket.socket) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda message: text.decode("latin-1"))
            Channel(sock, THEIRS).send(None)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for text in (b"{", b"\xff\xfe", b"[" * 100_000):
            send(text, theirs)
            with pytest.raises(TransportError, match="a message that is no JSON"):
                Channel(ours, OURS).receive(5)


def test_damaged_headers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = bytes(range(JOB_BYTES))
    listener = _listener.Listener("127.0.0.1", 0, 1, _SECRET, job)
    good = _listener._HEADER.pack(_listener._MAGIC, _listener._VERSION, 3, 0, 2, 1, job)
    listener.assign(1, job, num_processes=4)
    told = "meant for another process|of another job|in the name of process"
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(listener):
        for header in inputs([good], damage_bytes):
            padded = header[: len(good)].ljust(len(good), b"\0")
            monkeypatch.setattr(handshake, "accept", lambda *_, padded=padded: (padded, OURS))
            _, _, channel, _, source, _, _ = _listener._HEADER.unpack(padded)
            is_sound = padded[:10] == good[:10] and padded[22:] == good[22:]
            if is_sound and source in (2, 3):
                assert listener._authenticate(ours)[0] == (source, channel)
            else:
                with pytest.raises(JaxhetError, match=told):
                    listener._authenticate(ours)


def test_damaged_answers_of_acceptors_are_refused() -> None:
    job = bytes(range(JOB_BYTES))
    info = ProcessInfo.from_json(process_info_of(1))
    good = _listener._ANSWER.pack(1, job)
    _listener._check_answer(good, info, info.address, job)
    for answer in inputs([good], damage_bytes):
        padded = answer[: len(good)].ljust(len(good), b"\0")
        if padded != good:
            with pytest.raises(TransportError, match=r"is of another job|is of this job; check"):
                _listener._check_answer(padded, info, info.address, job)


def test_damaged_process_infos_are_refused() -> None:
    def come(message: Any) -> None:
        info = ProcessInfo.from_json(message)
        disagreement(info, ProcessInfo.from_json(process_info_of(1)))
        assert str(info).startswith("process ")

    for message in inputs([process_info_of(0), process_info_of(1)], damage_json):
        with contextlib.suppress(JaxhetError):
            come(message)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ProcessInfo)])
def test_process_info_without_a_field_is_refused(field: str) -> None:
    fields = process_info_of(0)
    wrong = 1.5
    with pytest.raises(
        JaxhetError, match=f"{field} of a process's description is 1.5, which is no "
    ):
        ProcessInfo.from_json({**fields, field: wrong})
    del fields[field]
    with pytest.raises(JaxhetError, match=f"a process's description lacks {field}; its fields are"):
        ProcessInfo.from_json(fields)


_PLACE = {"process": 0, "job": "00" * JOB_BYTES, "service": "127.0.0.1:9"}


def test_damaged_answers_of_the_coordinator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    identity, authority = Identity(), Authority()
    pems = authority.sign(identity.request, 0), authority.certificate
    certificate = {"pem": pems[0].decode(), "authority": pems[1].decode()}
    members = [process_info_of(1), process_info_of(0)]
    good = {"members": members, **_PLACE, "certificate": certificate}
    seeds = [good, {**good, "members": members[:1]}, {"error": ["UsageError", "no"]}]
    seeds += [{"clock": [1, 2.5]}]
    monkeypatch.setattr(identity, "process_credentials", lambda *given: given)
    monkeypatch.setattr(_membership, "_new_identity", lambda: identity)
    for message in inputs(seeds, damage_json):
        with said(message) as (sock, channel):
            membership = _membership.Membership(sock, channel)
            membership._left.set()  # so that the end of the input is no error
            with contextlib.suppress(JaxhetError):
                membership.join(ProcessInfo.from_json(members[1]), 5)
                assert sorted(member.process for member in membership.members) == [0, 1]
            sock.close()


def test_damaged_news_of_the_coordinator_are_heard() -> None:
    seeds = [{"error": ["PeerError", "process 1 is gone"]}, {"clock": [1, 2.5]}]
    for message in inputs(seeds, damage_json):
        with said(message) as (sock, channel):
            membership = _membership.Membership(sock, channel)
            membership._follow()  # ends, and keeps an error for the program
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
    fuzzed = set(re.findall(_COVERED, _fuzzers_of_the_engine()))
    assert cpp, "the pattern finds no parser"
    missing = cpp - fuzzed
    assert not missing, "name these files in `covers` of a fuzzer that reaches their parsers"
    assert all((_ROOT / name).exists() for name in fuzzed)
    measured = {f"xla_plugin/{name}" for name in fuzz_coverage.CPP}
    assert fuzzed == measured, "tools/fuzz_coverage.py measures what the fuzzers cover"


def _fuzzers_of_the_engine() -> str:
    """The sources of the fuzzers in C++."""
    paths = sorted((_ROOT / "tests" / "cpp").glob("fuzz_*_test.cc"))
    return "".join(path.read_text() for path in paths)
