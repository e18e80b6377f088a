"""Transports that the report of `jaxhet doctor --qualify` lets a job use."""

import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxhet._config import PlacedConfig
from jaxhet._errors import TransportError, UsageError
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.proofs import SCHEMA, Proof, Qualification, worst
from jaxhet._json import decode
from jaxhet._options import TRANSPORTS


def refusals(config: PlacedConfig, members: Sequence[ProcessInfo]) -> dict[int, dict[str, str]]:
    """Transports to each other process that the report does not allow, and why.

    {} if the job follows no report.

    Raises:
      UsageError: there is no report of that name, or it is not valid for this job.
      TransportError: The report allows no transport to some process.
    """
    if not config.qualification:
        return {}
    report = read(config.qualification)
    own = members[config.process_id]
    where = f"not proven by {config.qualification} (written {report.written})"
    found = {
        peer.process: {
            transport: f"{where}: {reason}"
            for transport in TRANSPORTS
            if (reason := refusal(report, own, peer, transport))
        }
        for peer in members
        if peer is not own
    }
    for process, reasons in found.items():
        if reasons.keys() >= set(config.transports):
            each = (f"{name}: {reasons[name]}" for name in config.transports)
            raise TransportError(f"no transport reaches {members[process]}; {'; '.join(each)}")
    return found


def read(path: str) -> Qualification:
    """The report.

    Raises:
      UsageError: it is not there, is cut, or is of another schema or version of jaxhet.
    """
    try:
        value = json.loads(pathlib.Path(path).read_text())
        problem = _problem(value)
        if not problem:
            return decode(Qualification, value, "the report")
    except OSError as error:
        problem = f"{error.strerror}; process 0 has written it, and every host needs a copy"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it is cut, or was changed ({error})"
    raise UsageError(
        f"the job can't use the qualification {path}: {problem}; run `jaxhet doctor --qualify"
        f" --report {path}` on all hosts, or unset JAXHET_QUALIFICATION"
    )


def _problem(value: Any) -> str:
    """Why a JSON value is not a report of this version of jaxhet, or ""."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        return f"its schema is {schema}, not {SCHEMA}"
    ours, theirs = importlib.metadata.version("jaxhet"), value["versions"]["jaxhet"]
    return "" if theirs == ours else f"jaxhet {theirs} has written it, and this is {ours}"


def refusal(
    report: Qualification,
    one: ProcessInfo,
    other: ProcessInfo,
    transport: str,
) -> str:
    """Why two processes can't use a transport, or "". Pure."""
    ends = sorted((info.host, info.platform) for info in (one, other))
    same_host = one.host_id == other.host_id
    pairs = [
        pair
        for pair in report.pairs
        if (sorted(zip(pair.hosts, pair.platforms, strict=True)), pair.same_host)
        == (ends, same_host)
    ]
    proofs = [proof for pair in pairs for proof in pair.proofs if proof.transport == transport]
    proof = worst(proofs) if proofs else Proof(transport, "refused", "it was not tried", ())
    if proof.state == "proven":
        return ""
    if not pairs:
        places = " and ".join(f"{platform} of {host}" for host, platform in ends)
        kind = "processes of one host" if same_host else "hosts"
        return f"nothing was tried between {places} ({kind}); qualify the whole job on its devices"
    return f"{proof.state}: {proof.reason}"
