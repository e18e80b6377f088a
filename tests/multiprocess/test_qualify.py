"""`jaxhet doctor --qualify` in healthy jobs and in jobs with a fault."""

import collections
import json
import pathlib
import re
import subprocess

from jaxhet._doctor import exchanges
from jaxhet._doctor.exchanges import Found, PeerFound
from jaxhet._doctor.qualify import merge, pair_proofs
from jaxhet._job.proofs import Proof
from tests.support import schemas
from tests.support.commands import launch, python
from tests.support.scripts import job, run

# The command, whose processes `{change}` changes, and the same in the processes that it starts.
SCRIPT = """
import os, sys
from jaxhet._doctor import qualify
change = {change!r}
exec(change)
start = "import pathlib; exchanges.main(pathlib.Path(sys.argv[1]))"
qualify.COMMAND = (sys.executable, "-c", change + start)
sys.argv = ["jaxhet", "doctor", "--qualify", "--report", {report!r}]
from jaxhet.cli import main
main()
"""
SMALL = """
import sys
from jaxhet._doctor import exchanges
exchanges.SIZES, exchanges.TIMED, exchanges.CHECKS = (8, 1 << 20), {8: 4, 1 << 20: 4}, 3
"""
ELSEWHERE = """
import dataclasses, os
from jaxhet import _set_up
from tests.support.commands import launch, python
process = os.environ["JAXHET_PROCESS_ID"]
make_info = _set_up.make_process_info
def elsewhere(*arguments):
    info = make_info(*arguments)
    return dataclasses.replace(info, host_id="elsewhere") if process == "2" else info
_set_up.make_process_info = elsewhere
"""
# A libc whose process_vm_readv changes a bit of each long read.
LIAR = """
#define _GNU_SOURCE
#include <sys/uio.h>
#include <sys/syscall.h>
#include <unistd.h>
ssize_t process_vm_readv(pid_t pid, const struct iovec* to, unsigned long num_to,
                         const struct iovec* from, unsigned long num_from, unsigned long flags) {
  ssize_t got = syscall(SYS_process_vm_readv, pid, to, num_to, from, num_from, flags);
  if (got > 0 && to[0].iov_len > 65536) ((char*)to[0].iov_base)[12345] ^= 4;
  return got;
}
"""


def test_launched_job_proves_every_pair(tmp_path: pathlib.Path):
    """Three processes; the third one pretends to be on another host."""
    report = tmp_path / "report.json"
    script = SCRIPT.format(change=SMALL + ELSEWHERE, report=str(report))
    ended = python(*launch("--processes-per-island=2,1", "--devices=2"), "-c", script)
    assert "ok: every pair has a proven transport" in ended.stdout
    schemas.check("qualify", report.read_text())
    found = json.loads(report.read_text())
    assert found["ok"]
    pairs = {tuple(pair["processes"]): pair for pair in found["pairs"]}
    assert {key: pair["same_host"] for key, pair in pairs.items()} == {
        (0, 1): True,
        (0, 2): False,
        (1, 2): False,
    }
    for (_, high), pair in pairs.items():
        assert pair["platforms"] == ["cpu", "cpu"]
        proofs = {proof["transport"]: proof for proof in pair["proofs"]}
        assert (proofs["socket"]["state"], proofs["socket"]["reason"]) == ("proven", "")
        assert {s["num_bytes"]: s["repeats"] for s in proofs["socket"]["swaps"]} == {
            8: 4,
            1 << 20: 4,
        }
        assert all(s["p50_us"] > 0 and s["gb_per_s"] > 0 for s in proofs["socket"]["swaps"])
        shared = proofs["process_vm"]
        assert shared["state"] == ("proven" if high == 1 else "refused")
        if high == 2:
            assert shared["reason"] == "the processes are on different hosts"
    text = " ".join(ended.stdout.replace("[island0/0]", "").split())
    assert "process_vm refused: the processes are on different hosts" in text


def test_path_that_changes_a_bit_fails_alone(tmp_path: pathlib.Path):
    """Processes of Open MPI need no options. A job with the report takes the other path."""
    source, library, report = (tmp_path / name for name in ("liar.c", "liar.so", "report.json"))
    source.write_text(LIAR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    envs = [
        {
            "LD_PRELOAD": str(library),
            "JAXHET_AUTO": "1",
            "JAXHET_COORDINATOR_ADDRESS": env["JAXHET_COORDINATOR_ADDRESS"],
            "JAXHET_JOB_SECRET": env["JAXHET_JOB_SECRET"],
            "OMPI_COMM_WORLD_RANK": env["JAXHET_PROCESS_ID"],
            "OMPI_COMM_WORLD_LOCAL_RANK": env["JAXHET_PROCESS_ID"],
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
        for env in job()
    ]
    ended = run(SCRIPT.format(change=SMALL, report=str(report)), *envs, timeout_s=120)
    assert [e.code for e in ended] == [1, 1], ended
    assert f"written to {report}" in ended[0].text
    assert "written" not in ended[1].text
    assert "error: a pair has no proven transport, or one failed" in ended[0].text
    found = json.loads(report.read_text())
    proofs = {proof["transport"]: proof for proof in found["pairs"][0]["proofs"]}
    assert not found["ok"]
    assert proofs["process_vm"]["state"] == "failed"
    assert "exchange 0: 1 of 1048576 bytes are not what was sent" in proofs["process_vm"]["reason"]
    assert proofs["socket"]["state"] == "proven"
    for transport, refused in _paths(str(report)):
        assert transport == "socket"
        assert "1 of 1048576 bytes are not what was sent" in refused["process_vm"]


def test_rounds_hold_each_pair_of_two_processes_once():
    for processes in ([0, 1], [0, 0, 1, 1], [0, 1, 2], [0, 0, 1, 2, 2], [0, 0, 0, 1]):
        found = exchanges.rounds(processes)
        ranks = range(len(processes))
        wanted = [(a, b) for a in ranks for b in ranks if a < b and processes[a] != processes[b]]
        assert sorted(pair for pairs in found for pair in pairs) == wanted
        for pairs in found:
            assert max(collections.Counter(rank for pair in pairs for rank in pair).values()) == 1
    assert exchanges.rounds([0]) == []


def test_job_that_fails_proves_what_it_has_finished():
    """Process 2 dies after the exchanges between 0 and 1."""
    done = PeerFound(["verbs"], [["host", "no"]])
    begun = PeerFound(["verbs"], [["host", "no"]], rounds_left=1)
    answers = [
        Found({"1": done, "2": begun}, "PeerError: process 2 died"),
        Found({"0": done, "2": begun}, "PeerError: process 2 died"),
        Found({}, "it ended with exit code -9"),
    ]
    allowed = ["host", "verbs", "socket"]
    assert pair_proofs(answers, (0, 1), allowed) == {
        "host": Proof("host", "refused", "no", ()),
        "verbs": Proof("verbs", "proven", "", ()),
    }
    lost = pair_proofs(answers, (1, 2), allowed)
    assert {name: proof.state for name, proof in lost.items()} == {
        "host": "failed",
        "verbs": "failed",
    }
    assert lost["verbs"].reason.endswith(
        "before the exchanges were finished: PeerError: process 2 died"
    )
    # Two processes that had to take a transport that is not in question.
    fallen_back = PeerFound(["socket"], [["verbs", "no NIC"]])
    both = [Found({"1": fallen_back}), Found({"0": fallen_back})]
    assert pair_proofs(both, (0, 1), ["verbs"]) == {
        "verbs": Proof("verbs", "refused", "no NIC", ())
    }


def test_proof_is_the_worst_of_both_sides():
    good = Proof("socket", "proven", "", ())
    refused = Proof("socket", "refused", "no", ())
    failed = Proof("socket", "failed", "lost", ())
    assert merge(good, good, (0, 1)) == good
    assert merge(refused, refused, (0, 1)) == refused
    assert merge(good, refused, (0, 1)) == Proof("socket", "refused", "process 1: no", ())
    assert merge(failed, refused, (2, 5)) == Proof(
        "socket", "failed", "process 2: lost; process 5: no", ()
    )


# Prints the transports of this process, and why better ones were refused.
JOINED = """
import dataclasses, json, jaxhet
jaxhet.initialize()
print(json.dumps([dataclasses.asdict(path) for path in jaxhet.paths()]), flush=True)
jaxhet.shutdown()
"""


def _paths(report: str) -> list[tuple[str, dict[str, str]]]:
    """For each process of a job of two: the transport; the others, and why they were refused."""
    ended = run(JOINED, *job(JAXHET_QUALIFICATION=report))
    assert [e.code for e in ended] == [0, 0], ended
    # A library may write further lines, at the end too.
    lines = [re.search(r"^\[\{.*\}\]$", e.text, re.MULTILINE) for e in ended]
    assert all(lines), ended
    found = [json.loads(line[0])[0] for line in lines if line]
    return [(p["transport"], {r["transport"]: r["reason"] for r in p["refused"]}) for p in found]
