"""`jaxhet doctor --qualify` in healthy jobs and in jobs with a fault."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from jaxhet import _ffi
from jaxhet._doctor.qualify import SIZES, merge
from jaxhet._job.proofs import SCHEMA, PairProof, Proof, Qualification
from tests.support import schemas
from tests.support.jobs import ROOT
from tests.support.scripts import Ended, job, run

# Runs the command; before, `{change}` may make this process another one than it is.
SCRIPT = """
import dataclasses, os, sys
from jaxhet import _set_up
from jaxhet._doctor import qualify
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
    """Output of two processes, and the report."""
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
    schemas.check("qualify", report.read_text())
    found = json.loads(report.read_text())
    assert found["ok"]
    assert [pair["processes"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in found["pairs"]:
        assert pair["same_host"]
        assert [proof["transport"] for proof in pair["proofs"]] == [*_ffi.TRANSPORTS]
        (tcp,) = (proof for proof in pair["proofs"] if proof["transport"] == "socket")
        assert (tcp["state"], tcp["reason"]) == ("proven", "")
        assert {s["num_bytes"]: s["repeats"] for s in tcp["swaps"]} == SIZES
        assert all(s["p50_us"] > 0 and s["gb_per_s"] > 0 for s in tcp["swaps"])


def test_processes_of_mpirun_need_no_options(tmp_path: pathlib.Path):
    report = tmp_path / "report.json"
    script = f"""
import sys
from jaxhet._doctor import qualify
qualify.SIZES = {{8: 3}}
sys.argv = ["jaxhet", "doctor", "--qualify", "--report", {str(report)!r}]
from jaxhet.cli import main
main()
"""
    envs = [
        {
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
    ended = run(script, *envs, timeout_s=120)
    assert [e.code for e in ended] == [0, 0], ended
    assert f"written to {report}" in ended[0].text
    assert "written" not in ended[1].text
    assert json.loads(report.read_text())["ok"]


def test_other_host_refuses_shared_memory(tmp_path: pathlib.Path):
    """Process 1 pretends to be elsewhere."""
    change = """
make_info = _set_up.make_process_info
_set_up.make_process_info = lambda *a: dataclasses.replace(make_info(*a), host_id=f"host {me}")
"""
    ended, found = _qualify(tmp_path, change)
    assert [e.code for e in ended] == [0, 0], ended
    *loopbacks, pair = found["pairs"]
    assert [loopback["processes"] for loopback in loopbacks] == [[0, 0], [1, 1]]
    for loopback in loopbacks:
        assert loopback["same_host"]
        assert {p["transport"]: p["state"] for p in loopback["proofs"]}["socket"] == "proven"
    assert not pair["same_host"]
    proofs = {proof["transport"]: proof for proof in pair["proofs"]}
    assert proofs["socket"]["state"] == "proven"
    assert proofs["process_vm"]["state"] == "refused"
    assert proofs["process_vm"]["reason"] == "the processes are on different hosts"
    text = " ".join(ended[0].text.split())
    assert "process_vm refused: the processes are on different hosts" in text


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
    good = Proof("socket", "proven", "", ())
    refused = Proof("socket", "refused", "no", ())
    failed = Proof("socket", "failed", "lost", ())
    slow, fast = (Proof("socket", "proven", "", (), link_gb_per_s=rate) for rate in (1.25, 12.5))
    assert merge(good, good, (0, 1)) == good
    assert merge(refused, refused, (0, 1)) == refused
    assert merge(fast, slow, (0, 1)) == slow
    assert merge(good, slow, (0, 1)) == slow
    assert merge(good, refused, (0, 1)) == Proof("socket", "refused", "process 1: no", ())
    assert merge(failed, refused, (2, 5)) == Proof(
        "socket", "failed", "process 2: lost; process 5: no", ()
    )


# Prints what this process has taken, and why not what is better.
JOINED = """
import dataclasses, json, jaxhet
jaxhet.initialize()
print(json.dumps([dataclasses.asdict(path) for path in jaxhet.paths()]), flush=True)
jaxhet.shutdown()
"""


def _report(folder: pathlib.Path, **states: Any) -> str:
    """One that says of two processes of this host what each transport did."""
    proofs = tuple(Proof(name, state, "", ()) for name, state in states.items())
    pair = PairProof((0, 1), (platform.node(), platform.node()), True, proofs)
    versions = {"jaxhet": importlib.metadata.version("jaxhet")}
    path = folder / "report.json"
    report = Qualification(SCHEMA, True, versions, "2026-07-31 09:30 UTC", (pair,))
    path.write_text(json.dumps(dataclasses.asdict(report)))
    return str(path)


def _paths(report: str) -> list[tuple[str, dict[str, str]]]:
    """For each process of a job of two: the transport; the others, and why they were refused."""
    ended = run(JOINED, *job(JAXHET_QUALIFICATION=report))
    assert [e.code for e in ended] == [0, 0], ended
    # A library may write further lines, at the end too.
    lines = [re.search(r"^\[\{.*\}\]$", e.text, re.MULTILINE) for e in ended]
    assert all(lines), ended
    found = [json.loads(line[0])[0] for line in lines if line]
    return [(p["transport"], {r["transport"]: r["reason"] for r in p["refused"]}) for p in found]


def test_job_takes_what_its_report_proves(tmp_path: pathlib.Path):
    path = _report(tmp_path, socket="proven", process_vm="failed")
    where = f"not proven by {path} (written 2026-07-31 09:30 UTC): "
    for transport, refused in _paths(path):
        assert transport == "socket"
        assert refused["process_vm"] == where + "failed: "
        assert refused["verbs"] == where + "refused: it was not tried"


def test_job_of_which_nothing_is_proven_does_not_start(tmp_path: pathlib.Path):
    path = _report(tmp_path, socket="failed")
    for ended in run(JOINED, *job(JAXHET_QUALIFICATION=path)):
        assert ended.code == 1
        assert "no transport reaches it" in ended.text
        assert f"socket: not proven by {path}" in ended.text


def test_report_that_one_process_lacks_ends_the_job(tmp_path: pathlib.Path):
    first, second = job(JAXHET_QUALIFICATION=_report(tmp_path, socket="proven"))
    second["JAXHET_QUALIFICATION"] = str(tmp_path / "absent.json")
    for ended in run(JOINED, first, second):
        assert ended.code == 1
        assert "No such file or directory; process 0 has written it" in ended.text
