"""Strangers reach the ports of a job, and the job continues."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.support.jobs import PYTHONPATH
from tests.support.scripts import job, run

JOIN = "import jaxhet; jaxhet.initialize(); print('joined')"
_MAPPED_LOOPBACK = "0000000000000000FFFF00000100007F"  # ::ffff:127.0.0.1, as /proc/net/tcp6 has it

# Sums over both islands until there is a line on stdin.
_VICTIM = """
import select, sys, time
import jax, jax.numpy as jnp, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax._src import distributed
jaxhet.initialize()
sharding = NamedSharding(jaxhet.make_mesh({"x": -1}), P("x"))
x = jax.make_array_from_callback((8,), sharding, lambda i: np.arange(8, dtype=np.float32)[i])
total = jaxhet.jit(lambda x: (jnp.sum(x), x + 1))
go_on = jaxhet.jit(lambda x: jnp.max(x))
print("service", distributed.global_state.coordinator_address, flush=True)
while True:
    assert float(total(x)[0]) == 28
    over = bool(select.select([sys.stdin], [], [], 0.05)[0])
    stop = jax.make_array_from_callback((2,), sharding, lambda i: np.full(1, over, np.float32))
    if float(go_on(stop)):
        break
jaxhet.shutdown()
print("ended well", flush=True)
"""

# Speaks JAX's gRPC without a certificate: single calls, then jaxlib's own client as node 0, which
# aborts its process when it can't connect.
_INTRUDER = """
import sys, grpc
from jax._src.lib import _jax
channel = grpc.insecure_channel(sys.argv[1])
evil = b"\\x0a\\x09\\x0a\\x04evil\\x12\\x011"
for method in ("InsertKeyValue", "GetKeyValueDir", "DeleteKeyValue", "ShutdownTask"):
    call = channel.unary_unary(f"/xla.coordination.CoordinationService/{method}")
    try:
        print(method, "answered", call(evil, timeout=3), flush=True)
    except grpc.RpcError as error:
        print(method, error.code().name, error.details(), flush=True)
client = _jax.get_distributed_runtime_client(sys.argv[1], 0, init_timeout=2, shutdown_timeout=2)
client.connect()
print("connect answered", flush=True)
"""


def _start(script: str, env: Mapping[str, str], *args: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        env={**kept, "PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu", **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _service_of(process: subprocess.Popen[str]) -> str:
    """The address of JAX's service, from the line that says it."""
    assert process.stdout is not None
    before: list[str] = []
    for line in process.stdout:
        if line.startswith("service "):
            return line.split()[1]
        before.append(line)
    raise AssertionError("".join(before))


def _attack(address: str) -> str:
    intruder = _start(_INTRUDER, {}, address)
    return intruder.communicate(timeout=90)[0]


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        text = process.communicate("\n", timeout=90)[0]
        assert process.returncode == 0, text
        assert "ended well" in text


def _check_refused(text: str) -> None:
    assert "answered" not in text
    for method in ("InsertKeyValue", "GetKeyValueDir", "DeleteKeyValue", "ShutdownTask"):
        assert f"{method} UNAVAILABLE" in text, text
    assert "DEADLINE_EXCEEDED" in text, text


@pytest.mark.slow
def test_intruder_gets_answers_where_there_is_no_tls() -> None:
    """The attack below is one."""
    script = """
import sys
from jaxhet._jax import jaxlib
address, service = jaxlib.start_coordination_service("127.0.0.1", 1, None)
print("service", address, flush=True)
sys.stdin.readline()
service.shutdown()
print("ended well", flush=True)
"""
    process = _start(script, {})
    text = _attack(_service_of(process))
    # The service reads the call. Of a node that has not said hello it wants another number.
    assert "InsertKeyValue INTERNAL wrong service incarnation" in text, text
    assert "connect answered" in text, text
    process.communicate("\n", timeout=30)


def test_stranger_that_speaks_grpc_without_a_certificate_is_refused() -> None:
    processes = [_start(_VICTIM, env) for env in job()]
    addresses = [_service_of(process) for process in processes]
    text = _attack(addresses[0])
    _end(processes)
    _check_refused(text)


@pytest.mark.slow
def test_wish_for_secure_credentials_is_met_by_the_job() -> None:
    """Where JAX would abort the process, the job has certificates of its own."""
    for ended in run(JOIN, *job(JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS="1")):
        assert (ended.code, "joined" in ended.text) == (0, True), ended.text


# Listening.

# Prints the addresses that this process and the coordinator listen on.
_LISTENING = """
import os, pathlib, jax, jaxhet
def listening(pid):
    inodes = {}
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    names = []
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(fd.readlink()))
        except OSError:
            pass
    return [inodes[name] for name in names if name in inodes]
jaxhet.initialize()
jax.numpy.ones(3).block_until_ready()
address = os.environ["JAXHET_COORDINATOR_ADDRESS"]
def is_coordinator(pid):
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split(chr(0))
    except OSError:  # it has ended
        return False
    return "jaxhet._job.coordinator_process" in words and address in words
(coordinator,) = filter(is_coordinator, filter(str.isdigit, os.listdir("/proc")))
print("addresses:", *listening("self"), "coordinator:", *listening(coordinator), flush=True)
jaxhet.shutdown()
"""


def test_launched_job_listens_on_loopback_only() -> None:
    launch = [sys.executable, "-m", "jaxhet.cli", "launch", "--islands", "2"]
    ended = subprocess.run(
        [*launch, "--", sys.executable, "-c", _LISTENING],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line.partition("addresses: ")[2] for line in ended.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        own, coordinator = (part.split() for part in line.split("coordinator:"))
        assert set(own) <= {"0100007F"}  # 127.0.0.1; own: Gloo
        assert own
        assert coordinator
        assert set(coordinator) <= {"0100007F", _MAPPED_LOOPBACK}
        assert len(coordinator) == 1  # JAX's service: the job is complete


@pytest.mark.slow
def test_gloo_listens_on_the_address_that_reaches_the_coordinator() -> None:
    """This host's name has another address."""
    elsewhere = """
from jaxhet._job import membership
membership.Membership.local_address = property(lambda _: "127.0.0.2")
"""
    for ended in run(elsewhere + _LISTENING, *job(), timeout_s=90):
        assert ended.code == 0, ended.text
        own = ended.text.partition("addresses: ")[2].partition(" coordinator:")[0].split()
        assert own
        assert set(own) == {"0200007F"}, ended.text
