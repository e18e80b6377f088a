"""A coordinator with few descriptors, under connections of strangers."""

import os
import resource
import socket
import subprocess
from collections.abc import Iterator

import pytest

from jaxhet._job import coordinator
from jaxhet._net import handshake
from jaxhet.testing import free_port
from tests.support.jobs import ROOT
from tests.support.scripts import environment

_SECRET = "a secret of tests"
_DESCRIPTORS = 256
_MORE = 40  # connections than descriptors


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a coordinator process that may open few descriptors."""
    port = free_port()
    process = subprocess.Popen(
        coordinator.command(f"127.0.0.1:{port}", 2, 60),
        cwd=ROOT,
        env={**environment(), **coordinator.QUIET, "JAXHET_JOB_SECRET": _SECRET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
            yield port
            assert process.poll() is None
            assert len(os.listdir(f"/proc/{process.pid}/fd")) <= _DESCRIPTORS
        finally:
            process.kill()


def _join(port: int) -> None:
    """Does what an honest process does; raises what it would."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        handshake.connect(sock, _SECRET.encode(), coordinator.HEADER)


def test_coordinator_with_few_descriptors_outlives_a_flood(port: int) -> None:
    _join(port)
    count = _DESCRIPTORS + _MORE
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(count)]
    _join(port)  # the oldest of the strangers make room
    for sock in strangers:
        sock.close()
    _join(port)
