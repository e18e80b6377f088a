"""`jaxhet coordinator` as a service, and processes that were started by hand or by a scheduler."""

import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from jaxhet.testing import free_port
from tests.support.scripts import environment, job, run
from tests.support.waiting import wait_until

_SECRET = {"JAXHET_JOB_SECRET": "a secret of tests", "JAXHET_CONNECT_TIMEOUT_S": "20"}
_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
rows = np.arange(4, dtype=np.float32) + 1
x = jax.make_array_from_callback((4,), sharding, rows.__getitem__)
print("sum", float(jax.jit(lambda x: jnp.sum(x * x))(x)), "process", jax.process_index())
jax.distributed.shutdown()
"""
_JOIN = "import jaxhet; jaxhet.initialize(); print('joined')"
_AUTO = {**_SECRET, "JAXHET_AUTO": "1", "JAXHET_CPU_DEVICES": "1"}


@contextlib.contextmanager
def _service(*arguments: str, **env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running coordinator, and its address; ready when its port answers."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxhet.cli", "coordinator", "--bind", address, *arguments]
    service = subprocess.Popen(
        command,
        env={**environment(), **_SECRET, **env},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: _answers(address), 120)
        yield address, service
    finally:
        service.kill()
        service.wait()
        if service.stderr is not None:
            service.stderr.close()


def _answers(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def _strangers(address: str) -> list[socket.socket]:
    """Connections that say nothing, nonsense, or half of something; they stay open."""
    host, port = address.split(":")
    words = (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(4096), b"\0" * 31)
    sockets = []
    for text in words * 5:
        sockets.append(socket.create_connection((host, int(port))))
        with contextlib.suppress(OSError):
            sockets[-1].sendall(text)
    return sockets


def _task_of_slurm(address: str, process: int) -> Mapping[str, str]:
    """Task `process` of a heterogeneous job of Slurm: a component and a node for each of two."""
    node = f"n{process}"
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        **{f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"n{i}" for i in range(2)},
        **{f"SLURM_TASKS_PER_NODE_HET_GROUP_{i}": "1" for i in range(2)},
        "SLURM_STEP_NODELIST": node,
        "SLURMD_NODENAME": node,
        "SLURM_NODEID": str(process),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
    }


def test_service_outlives_strangers_and_ends_with_the_job() -> None:
    """One process is a task of Slurm, the other was started by hand and is given its id."""
    with _service("--islands", "component0=1,component1=1") as (address, service):
        strangers = _strangers(address)
        by_hand = {
            "JAXHET_COORDINATOR_ADDRESS": address,
            "JAXHET_ISLAND": "component1",
            "JAXHET_ISLAND_PROCESS_ID": "0",
        }
        launched = {**_AUTO, "JAXHET_LAUNCHED": "1"}
        envs = [{**launched, **_task_of_slurm(address, 0)}, {**launched, **by_hand}]
        for process, ended in enumerate(run(_PROGRAM, *envs)):
            assert ended.code == 0, ended.text
            assert f"sum 30.0 process {process}\n" in ended.text
        _, said = service.communicate(timeout=20)
        assert service.returncode == 0, said
        assert f"listens on {address} for the 2 processes of a job" in said
        assert "the job has ended" in said
        for sock in strangers:
            sock.close()


def _addresses_differ(service_timeout_s: str) -> tuple[list[str], str]:
    """Errors of both processes and of a service, at which process 1 alone joins."""
    with _service(
        "--islands", "island0=1,island1=1", JAXHET_CONNECT_TIMEOUT_S=service_timeout_s
    ) as (
        address,
        service,
    ):
        first, second = job(JAXHET_JOB_SECRET=_SECRET["JAXHET_JOB_SECRET"])
        second["JAXHET_COORDINATOR_ADDRESS"] = address
        ended = run(_JOIN, first, second, timeout_s=120)
        _, said = service.communicate(timeout=60)
    assert [e.code for e in ended] == [1, 1]
    assert service.returncode == 1
    return [e.text for e in ended], said


def test_two_coordinators_at_two_addresses_are_said_by_everybody() -> None:
    """Process 0 starts a coordinator at its own address, and process 1 joins at another one."""
    texts, said = _addresses_differ("10")
    advice = "; start it, or continue it if it is stopped, give all processes the same JAXHET_"
    for missing, text in ((1, texts[0]), (0, texts[1]), (0, said)):
        assert f"process {missing} of 2 has not joined within 10 s{advice}" in text, text


@pytest.mark.slow
def test_coordinator_that_waits_longer_than_a_process_is_named_by_the_process() -> None:
    texts, _ = _addresses_differ("25")
    assert "TransportError: the coordinator at 127.0.0.1:" in texts[1]
    assert " has not started the job within 15 s; other processes may have another" in texts[1]
