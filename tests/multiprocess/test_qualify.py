"""`jaxhet doctor --qualify`: jobs in which all is well, and jobs in which it is not."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from jaxhet import _ffi
from jaxhet._inspect.proofs import Proof
from jaxhet._inspect.qualify import SIZES, merge
from tests.support.jobs import ROOT
from tests.support.scripts import Ended, job, run

# Runs the command; before, `{change}` may make this process another one than it is.
SCRIPT = """
import dataclasses, os, sys
from jaxhet import _initialize
from jaxhet._inspect import qualify
me = int(os.environ.pop("TEST_PROCESS"))
qualify.SIZES = {{8: 3, 1 << 20: 3}}
{change}
sys.argv = [
    *("jaxhet", "doctor", "--qualify", "--report", os.environ["TEST_REPORT"]),
    *("--coordinator", os.environ.pop("TEST_COORDINATOR")),
    *("--process-id", str(me), "--num-processes", "2"),
]
from jaxhet.cli import main
main()
"""


def _qualify(folder: pathlib.Path, change: str = "") -> tuple[list[Ended], dict[str, Any]]:
    """What two processes print, and the report."""
    report = folder / "report.json"
    envs = [
        {
            "TEST_PROCESS": env["JAXHET_PROCESS_ID"],
            "TEST_COORDINATOR": env["JAXHET_COORDINATOR_ADDRESS"],
            "TEST_REPORT": str(report),
            "JAXHET_JOB_SECRET": env["JAXHET_JOB_SECRET"],
        }
        for env in job()
    ]
    return run(SCRIPT.format(change=change), *envs, timeout_s=120), json.loads(report.read_text())


def test_launched_job_proves_every_pair(tmp_path: pathlib.Path):
    report = tmp_path / "report.json"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "jaxhet.cli", "launch", "--processes-per-island", "2,1", "--"),
            *(sys.executable, "-m", "jaxhet.cli", "doctor", "--qualify", "--report", str(report)),
        ],
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok: every pair has a proven transport" in ended.stdout
    found = json.loads(report.read_text())
    assert found["ok"]
    assert [pair["processes"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in found["pairs"]:
        assert pair["same_host"]
        assert [proof["transport"] for proof in pair["proofs"]] == [*_ffi.TRANSPORTS]
        (tcp,) = (proof for proof in pair["proofs"] if proof["transport"] == "tcp")
        assert (tcp["state"], tcp["reason"]) == ("proven", "")
        assert {s["num_bytes"]: s["repeats"] for s in tcp["swaps"]} == SIZES
        assert all(s["p50_us"] > 0 and s["gb_per_s"] > 0 for s in tcp["swaps"])


def test_other_host_refuses_shared_memory(tmp_path: pathlib.Path):
    """Process 1 pretends to be elsewhere."""
    change = """
make_claim = _initialize.make_claim
_initialize.make_claim = lambda *a: dataclasses.replace(make_claim(*a), host_id=f"host {me}")
"""
    ended, found = _qualify(tmp_path, change)
    assert [e.code for e in ended] == [0, 0], ended
    (pair,) = found["pairs"]
    assert not pair["same_host"]
    proofs = {proof["transport"]: proof for proof in pair["proofs"]}
    assert proofs["tcp"]["state"] == "proven"
    for name in ("shm", "shm_ring"):
        assert proofs[name]["state"] == "refused"
        assert proofs[name]["reason"] == "the processes are on different hosts"
    assert "shm refused: the processes are on different hosts" in " ".join(ended[0].text.split())


def test_one_wrong_byte_fails_the_transport(tmp_path: pathlib.Path):
    """Process 1 sends one bit otherwise than it says."""
    change = """
pattern = qualify.pattern
def wrong(is_high, num_bytes, repeat):
    sent = pattern(is_high, num_bytes, repeat)
    if me == 1 and is_high and num_bytes == 1 << 20 and repeat == 2:
        sent[num_bytes // 2] ^= 4
    return sent
qualify.pattern = wrong
"""
    ended, found = _qualify(tmp_path, change)
    assert [e.code for e in ended] == [1, 1], ended
    assert not found["ok"]
    for proof in found["pairs"][0]["proofs"]:
        if proof["transport"] == "verbs" and proof["state"] == "refused":
            continue  # no RDMA here
        assert proof["state"] == "failed"
        assert "1 of 1048576 bytes are not what was sent" in proof["reason"]
        assert [swap["num_bytes"] for swap in proof["swaps"]] == [8]
    assert "error: a pair has no proven transport, or one failed" in ended[0].text


def test_proof_is_the_worst_of_both_sides():
    good = Proof("tcp", "proven", "", ())
    refused = Proof("tcp", "refused", "no", ())
    failed = Proof("tcp", "failed", "lost", ())
    assert merge(good, good, (0, 1)) == good
    assert merge(refused, refused, (0, 1)) == refused
    assert merge(good, refused, (0, 1)) == Proof("tcp", "refused", "process 1: no", ())
    assert merge(failed, refused, (2, 5)) == Proof(
        "tcp", "failed", "process 2: lost; process 5: no", ()
    )
