"""Ports of a job: who can reach them, and credentials that JAX wishes for."""

import pytest

from tests.support.commands import launch, python
from tests.support.scripts import job, run

JOIN = "import jaxhet; jaxhet.initialize(); print('joined')"
_MAPPED_LOOPBACK = "0000000000000000FFFF00000100007F"  # ::ffff:127.0.0.1, as /proc/net/tcp6 has it


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
    ended = python(*launch("--islands=2"), "-c", _LISTENING)
    lines = [line.partition("addresses: ")[2] for line in ended.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        own, coordinator = (part.split() for part in line.split("coordinator:"))
        assert set(own) <= {"0100007F"}  # 127.0.0.1; own: Gloo and the relay to JAX's service
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
        assert sorted(own) == ["0100007F", "0200007F"], ended.text  # the relay, and Gloo
