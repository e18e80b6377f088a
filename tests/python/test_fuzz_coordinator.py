"""Damaged messages of a process of the job: coordinator and tuning class refuse them in words."""

import base64
import contextlib
import dataclasses
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jaxhet._errors import UsageError
from jaxhet._jax import jaxlib
from jaxhet._job import coordinator as _coordinator
from jaxhet._job import membership
from jaxhet._job.coordinator import Terms
from jaxhet._job.process_info import ProcessInfo
from jaxhet._net import certificates, handshake
from jaxhet._net.certificates import Authority, Identity
from tests.support.damage import OURS, damage_bytes, damage_json, inputs, process_info_of, said

_SECRET = b"a job secret of 32 random bytes."


class _Heard:
    """Messages to a process, in place of its outbox."""

    local_host = "127.0.0.1"

    def __init__(self) -> None:
        self.messages: list[str] = []

    def send(self, message: Any) -> None:
        self.messages.append(json.dumps(message))


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket for coordinators that own no service."""
    monkeypatch.setattr(
        jaxlib, "start_coordination_service", lambda *_: ("127.0.0.1:1", contextlib.nullcontext())
    )
    # Files in memory stay until the process ends: there would be some for each input.
    monkeypatch.setattr(certificates, "_in_memory", lambda _: os.devnull)
    monkeypatch.setattr(handshake, "accept", lambda *_: (membership.HEADER, OURS))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def _first_messages() -> list[dict[str, Any]]:
    """First messages of process 1: a sound one, and some that do not go with process 0."""
    request = Identity().request.decode()
    changes: list[dict[str, Any]] = [
        {},
        {"platform": "cuda"},
        {"island": "island0", "platform": "cuda"},
        {"island": "island0", "settings": {"XLA_FLAGS --xla_x": "1"}},
        {"has_cpu": False},
        {"is_declared": False},
        {"islands": ["island0=1", "island1=1"]},
        {"islands": ["island0=1", "island1=2"]},
        {"process": -1, "num_processes": -1, "island_process": 0},
        {"process": 0},
        {"process": 2},
        {"num_processes": 3},
    ]
    good = [
        {"process_info": {**process_info_of(1), **change}, "request": request} for change in changes
    ]
    return [*good, {"process_info": process_info_of(1), "request": None}]


def test_damaged_first_messages_end_in_words_for_everybody(listener: socket.socket) -> None:
    first, request = ProcessInfo.from_json(process_info_of(0)), Identity().request
    for message in inputs(_first_messages(), damage_json):
        terms = Terms(2, 5, {"island0": 1, "island1": 1})
        coordinator, heard = _coordinator.Coordinator(listener, _SECRET, terms), _Heard()
        coordinator._admit(first, request, heard)  # type: ignore[arg-type]
        with said(message) as (sock, _):
            try:
                come = coordinator._receive_info(sock)
            except Exception:  # the acceptor closes the connection
                continue
            coordinator._serve_one(sock, come)
        assert heard.messages or terms.place(come[1]).process != 1, message


def test_damaged_news_of_a_process_are_told(listener: socket.socket) -> None:
    seeds = [
        {"failed": ["UsageError", "no"]},
        {"bye": True},
    ]
    infos = [ProcessInfo.from_json(process_info_of(i)) for i in range(2)]
    for message in inputs(seeds, damage_json):
        coordinator, heard = _coordinator.Coordinator(listener, _SECRET, Terms(2, 5)), _Heard()
        coordinator._infos = dict(enumerate(infos))
        coordinator._outboxes = {0: heard}  # type: ignore[dict-item]
        with said(message) as (sock, channel):
            coordinator._follow(infos[1], sock, channel)
        assert coordinator._left == {1}
        assert heard.messages or "bye" in message, message


def test_damaged_requests_for_certificates_are_refused() -> None:
    authority = Authority()
    lines = Identity().request.decode().strip().splitlines()

    def damage(der: bytes, chosen: random.Random) -> bytes:
        text = base64.encodebytes(damage_bytes(der, chosen)).decode().strip()
        return "\n".join([lines[0], text, lines[-1], ""]).encode()

    for request in inputs([base64.b64decode("".join(lines[1:-1]))], damage):
        with contextlib.suppress(ValueError):
            assert authority.sign(request, 0).startswith(b"-----BEGIN CERTIFICATE-----")


class _FaultyTerms(Terms):
    def disagreement(self, info: ProcessInfo) -> str | None:
        raise ValueError("smoke")


def test_process_info_that_is_not_understood_is_told_to_everybody(listener: socket.socket) -> None:
    coordinator, heard = _coordinator.Coordinator(listener, _SECRET, _FaultyTerms(2, 5)), _Heard()
    coordinator._outboxes = {0: heard}  # type: ignore[dict-item]
    with said({"process_info": process_info_of(1), "request": Identity().request.decode()}) as (
        sock,
        _,
    ):
        coordinator._serve_one(sock, coordinator._receive_info(sock))
    words = (
        "the coordinator does not understand the description of process 1 (island1, pid ",
        "(ValueError('smoke')); use one version of jaxhet in the whole job",
    )
    assert all(word in heard.messages[0] for word in words), heard.messages


def test_size_of_thousands_of_digits_is_refused() -> None:
    info = dataclasses.replace(
        ProcessInfo.from_json(process_info_of(0)), islands=("island0=" + "9" * 5_000, "island1=1")
    )
    with pytest.raises(UsageError, match="is not of the form NAME=PROCESSES"):
        Terms(2, 5).disagreement(info)
