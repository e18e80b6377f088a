"""Transports that a report of `jaxhet doctor --qualify` allows a job, and the errors."""

import dataclasses
import importlib.metadata
import json
import pathlib
from typing import Any

import pytest

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.proofs import SCHEMA, PairProof, Proof, Qualification, Swap
from jaxhet._options import TRANSPORTS
from jaxhet._qualification import read, refusal, refusals
from tests.support.members import described

VERSIONS = {"jaxhet": importlib.metadata.version("jaxhet")}
PROCESS_VM = Proof("process_vm", "refused", "process_vm_readv: EPERM (1)", ())
VERBS = Proof("verbs", "failed", "7 of 8 bytes are not what was sent", ())
SOCKET = Proof("socket", "proven", "", (Swap(8, 200, 25.0, 0.1),))


def _report(*pairs: PairProof) -> Qualification:
    return Qualification(SCHEMA, True, VERSIONS, "2026-07-31 09:30 UTC", pairs)


def _pair(one: str, other: str, *proofs: Proof) -> PairProof:
    return PairProof((0, 1), (one, other), one == other, ("cpu", "cpu"), proofs)


def _info(process: int, host: str) -> ProcessInfo:
    return described(process, host=host, host_id=f"boot of {host}")


def _refusal(report: Qualification, transport: str, *hosts: str) -> str:
    one, other = hosts or ("amd0", "nv0")
    return refusal(report, _info(0, one), _info(1, other), transport)


def test_only_what_is_proven_may_be_used():
    report = _report(_pair("nv0", "amd0", PROCESS_VM, VERBS, SOCKET))
    assert _refusal(report, "socket") == ""
    assert _refusal(report, "process_vm") == "refused: process_vm_readv: EPERM (1)"
    assert _refusal(report, "verbs") == "failed: 7 of 8 bytes are not what was sent"
    assert _refusal(_report(_pair("nv0", "amd0", SOCKET)), "verbs") == "refused: it was not tried"


def test_two_hosts_are_as_good_as_their_worst_pair_of_processes():
    lost = dataclasses.replace(SOCKET, state="failed", reason="lost")
    report = _report(_pair("nv0", "amd0", SOCKET), _pair("amd0", "nv0", lost))
    assert _refusal(report, "socket") == "failed: lost"


def test_hosts_that_are_not_in_the_report_are_named():
    report = _report(_pair("nv0", "amd0", SOCKET))
    assert _refusal(report, "socket", "nv0", "nv7") == (
        "nothing was tried between cpu of nv0 and cpu of nv7 (hosts); qualify the whole job on its"
        " devices"
    )
    assert _refusal(report, "socket", "nv0", "nv0").startswith(
        "nothing was tried between cpu of nv0 and cpu of nv0 (processes of one host); qualify"
    )


def test_proof_with_cpus_says_nothing_about_gpus():
    report = _report(
        _pair("nv0", "amd0", SOCKET),
        dataclasses.replace(_pair("nv0", "amd0", VERBS, SOCKET), platforms=("cuda", "rocm")),
    )
    cpus = _info(0, "amd0"), _info(1, "nv0")
    nvidia = dataclasses.replace(cpus[1], platform="cuda")
    amd = dataclasses.replace(cpus[0], platform="rocm")
    assert refusal(report, amd, nvidia, "verbs") == "failed: 7 of 8 bytes are not what was sent"
    assert refusal(report, amd, nvidia, "socket") == ""
    assert refusal(report, *cpus, "verbs") == "refused: it was not tried"
    assert refusal(report, dataclasses.replace(amd, platform="cuda"), nvidia, "socket") == (
        "nothing was tried between cuda of amd0 and cuda of nv0 (hosts); qualify the whole job on"
        " its devices"
    )


def test_containers_of_one_name_are_two_hosts():
    report = _report(_pair("nv0", "nv0", SOCKET))
    one = _info(0, "nv0")
    other = dataclasses.replace(_info(1, "nv0"), host_id="another")
    assert refusal(report, one, _info(1, "nv0"), "socket") == ""
    assert refusal(report, one, other, "socket").startswith("nothing was tried between")


def _write(folder: pathlib.Path, **changes: Any) -> str:
    path = folder / "report.json"
    report = _report(_pair("nv0", "amd0", PROCESS_VM, VERBS, SOCKET), _pair("nv0", "nv0", SOCKET))
    path.write_text(json.dumps({**dataclasses.asdict(report), **changes}))
    return str(path)


def test_report_is_read_as_it_was_written(tmp_path: pathlib.Path):
    assert read(_write(tmp_path)).pairs[0].proofs == (PROCESS_VM, VERBS, SOCKET)


def test_reasons_are_given_for_every_other_process(tmp_path: pathlib.Path):
    path = _write(tmp_path)
    members = [_info(0, "nv0"), _info(1, "amd0"), _info(2, "nv0")]
    found = refusals(_config.resolve({"qualification": path}, {}).placed(0, 3), members)
    assert {p: set(reasons) for p, reasons in found.items()} == {
        process: {*TRANSPORTS} - {"socket"} for process in (1, 2)
    }
    assert found[1]["process_vm"] == (
        f"not proven by {path} (written 2026-07-31 09:30 UTC): refused: process_vm_readv: EPERM (1)"
    )


def test_without_a_report_nothing_is_refused():
    assert refusals(_config.resolve({}, {}).placed(0, 1), [_info(0, "nv0")]) == {}


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("", "it is cut, or was changed (Expecting value"),
        ('{"schema": 1', "it is cut, or was changed (Expecting ',' delimiter"),
        ("[]", "its schema is None, not"),
        ({"schema": SCHEMA + 1}, f"its schema is {SCHEMA + 1}, not {SCHEMA}"),
        (
            {"versions": {"jaxhet": "0.0.1"}},
            f"jaxhet 0.0.1 has written it, and this is {VERSIONS['jaxhet']}",
        ),
        (
            {"pairs": [{"hosts": ["nv0", "amd0"]}]},
            "it is cut, or was changed (entry 0 of pairs of the report lacks processes, same_host,"
            " platforms, proofs; its fields are processes, hosts, same_host, platforms, proofs)",
        ),
    ],
)
def test_report_of_another_kind_says_what_to_do(
    tmp_path: pathlib.Path, report: str | dict[str, Any], words: str
):
    path = _write(tmp_path, **(report if isinstance(report, dict) else {}))
    if isinstance(report, str):
        pathlib.Path(path).write_text(report)
    with pytest.raises(UsageError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"the job can't use the qualification {path}: {words}")
    assert text.endswith(
        f"; run `jaxhet doctor --qualify --report {path}` on all hosts, or unset"
        " JAXHET_QUALIFICATION"
    )


def test_report_that_is_missing_says_who_writes_it(tmp_path: pathlib.Path):
    path = str(tmp_path / "report.json")
    with pytest.raises(UsageError, match="process 0 has written it, and every host needs a copy"):
        read(path)
