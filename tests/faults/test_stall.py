"""A peer that does not answer, because the path to it swallows all packets."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from jaxhet.testing import free_port
from tests.support.jobs import ROOT
from tests.support.relay import Relay

VICTIM = str(pathlib.Path(__file__).with_name("victim.py"))
START_WITHIN_S = 90.0
REPORT_WITHIN_S = 10.0


@contextlib.contextmanager
def two_processes_over_a_relay(**env: str) -> Iterator[tuple[Relay, list[subprocess.Popen[str]]]]:
    """Process 1 reaches process 0 through a relay only."""
    ports = [free_port() for _ in range(2)]
    relay = Relay(ports[1])
    common = {
        **os.environ,
        **env,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAXHET_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}",
        "JAXHET_NUM_PROCESSES": "2",
        "JAXHET_JOB_SECRET": "a secret of tests",
    }
    first = {
        "JAXHET_SOCKET_PORT": str(ports[1]),
        "JAXHET_SOCKET_ADVERTISE": f"127.0.0.1:{relay.port}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", VICTIM, "100000"],
            env={**common, **more, "JAXHET_PROCESS_ID": str(i), "JAXHET_ISLAND": f"island{i}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, more in enumerate((first, {}))
    ]
    try:
        yield relay, processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        relay.close()


def wait_until_it_runs(process: subprocess.Popen[str]) -> None:
    """Waits until the process is in its loop; fails with its output if it ends or takes long."""
    assert process.stdout is not None
    lines: list[str] = []
    killer = threading.Timer(START_WITHIN_S, process.kill)
    killer.start()
    try:
        while not lines or "@ run" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
    finally:
        killer.cancel()


@pytest.mark.parametrize(
    "transport",
    ["socket", pytest.param("process_vm", marks=pytest.mark.slow)],
)
def test_half_open_connection_is_reported(transport: str) -> None:
    with two_processes_over_a_relay(JAXHET_TRANSPORTS=transport, JAXHET_PEER_TIMEOUT_S="3") as (
        relay,
        processes,
    ):
        for process in processes:
            wait_until_it_runs(process)
        relay.freeze()
        frozen = time.monotonic()
        texts = [process.communicate(timeout=30)[0] for process in processes]
        assert time.monotonic() - frozen < REPORT_WITHIN_S
    for process, text in enumerate(texts):
        assert re.search(rf"PeerError.*process {1 - process}\b", text), text
        assert "WRONG" not in text
