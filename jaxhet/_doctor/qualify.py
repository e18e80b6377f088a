"""`jaxhet doctor --qualify`: which transports carry bytes between the devices of a job.

The processes join a job on CPUs over `socket`, in which they gather their findings. Each process
starts a child for a second job, which has the devices that the user's job will have
(`exchanges.py`). The second job runs with all transports, then without the best one in use, and so
on, until none is left.
"""

import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxhet import _clusters, _config, _initialize, _session, _set_up
from jaxhet._config import Config
from jaxhet._doctor import exchanges
from jaxhet._doctor.exchanges import Found, PeerFound
from jaxhet._errors import UsageError
from jaxhet._jax import platforms
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.proofs import SCHEMA, PairProof, Proof, Qualification, worst
from jaxhet._json import decode
from jaxhet._net.addresses import join_address
from jaxhet._options import PREFIX, TRANSPORTS

COMMAND = (sys.executable, "-m", exchanges.__name__)
_DEADLINE_S = "60"  # longest wait of an exchange
# Variables of the job that this process is in.
_OF_THIS_JOB = [
    f"{PREFIX}{name}"
    for name in (
        "AUTO",
        "LAUNCHED",
        "ISLANDS",
        "ISLAND_PROCESS_ID",
        "COORDINATOR_BIND_ADDRESS",
        "QUALIFICATION",
        "METRICS_ADDRESS",
        "TRACE_FOLDER",
        "DUMP",
    )
]
# Transport of pairs that can't use the tested ones. Without it they would end the job.
_FALLBACK = "socket"


def qualify() -> tuple[int, Qualification]:
    """Joins the job of the environment as one of its processes, and proves all pairs.

    Returns:
      The number of this process, and what was proven, which is equal on every process.

    Raises:
      UsageError: the job is not complete.
      JaxhetError: it could not be set up, or a process died.
    """
    environ, platform = dict(os.environ), platforms.expected_platform()
    jax.config.update("jax_platforms", "cpu")
    # This run ignores an older report.
    arguments: dict[str, Any] = {"qualification": "", "connect": "all"}
    config = _clusters.resolve(arguments)
    if config.num_processes == 1:
        raise UsageError("a job of one process has nothing to prove; start doctor on several hosts")
    if not config.island and config.process_id is not None:
        arguments["island"] = f"process{config.process_id}"
    _initialize.initialize(**{**arguments, "transports": (_FALLBACK,)})
    try:
        session = _session.required()
        return session.process, _Job(session, config, platform, environ).prove()
    finally:
        _initialize.shutdown()


type Pair = tuple[int, int]


class _Job:
    """This process as a member of the job."""

    def __init__(
        self,
        session: _session.Session,
        config: Config,
        platform: str,
        environ: Mapping[str, str],
    ):
        self._config = config
        self._process = session.process
        self._host = session.config.socket_address or session.local_address
        self._environ = environ
        info = _set_up.make_process_info(session.config, "")
        own = dataclasses.replace(info, process=session.process, platform=platform)
        self._members = [*map(ProcessInfo.from_json, _gather(dataclasses.asdict(own)))]

    def prove(self) -> Qualification:
        written = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        proofs = self._prove_all()
        pairs = tuple(
            _pair_proof(low, high, proofs[low.process, high.process])
            for low, high in itertools.combinations(self._members, 2)
        )
        states = [[proof.state for proof in pair.proofs] for pair in pairs]
        return Qualification(
            schema=SCHEMA,
            ok=all("proven" in pair and "failed" not in pair for pair in states),
            versions=self._members[0].versions,
            written=_gather(written)[0],
            pairs=pairs,
        )

    def _prove_all(self) -> dict[Pair, dict[str, Proof]]:
        """Proofs of each pair by transport, from a job for each transport that some pair uses."""
        proofs = {pair: {} for pair in itertools.combinations(range(len(self._members)), 2)}
        allowed = [name for name in TRANSPORTS if name in self._config.transports]
        while allowed:
            answers = [decode(Found, one, "findings") for one in _gather(self._run_job(allowed))]
            for pair, known in proofs.items():
                for name, proof in pair_proofs(answers, pair, allowed).items():
                    known[name] = worst([*([known[name]] if name in known else []), proof])
            used = {n for known in proofs.values() for n in known if known[n].state != "refused"}
            best = next((name for name in allowed if name in used), allowed[-1])
            allowed = allowed[allowed.index(best) + 1 :]
        return proofs

    def _run_job(self, allowed: Sequence[str]) -> dict[str, Any]:
        """Findings of this process in a job with these transports: the fields of a `Found`."""
        address = _gather(_free_address(self._host))[0]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "found.json"
            ended = subprocess.run(
                [*COMMAND, str(file)],
                env=self._environment(address, allowed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=False,
            )
            if file.exists():
                return json.loads(file.read_text())
        return {"peers": {}, "error": f"it ended with exit code {ended.returncode}"}

    def _environment(self, address: str, allowed: Sequence[str]) -> dict[str, str]:
        """Environment of this process's child in the job at an address."""
        kept = {k: v for k, v in self._environ.items() if k not in _OF_THIS_JOB}
        return {
            **_config.for_new_job(kept),
            "JAXHET_COORDINATOR_ADDRESS": address,
            "JAXHET_NUM_PROCESSES": str(len(self._members)),
            "JAXHET_PROCESS_ID": str(self._process),
            "JAXHET_ISLAND": f"process{self._process}",  # so that all pairs are of two islands
            "JAXHET_TRANSPORTS": ",".join(dict.fromkeys((*allowed, _FALLBACK))),
            "JAXHET_DEADLINE_S": _DEADLINE_S,
        }


def _pair_proof(low: ProcessInfo, high: ProcessInfo, proofs: Mapping[str, Proof]) -> PairProof:
    return PairProof(
        processes=(low.process, high.process),
        hosts=(low.host, high.host),
        same_host=low.host_id == high.host_id,
        platforms=(low.platform, high.platform),
        proofs=tuple(proofs[name] for name in TRANSPORTS if name in proofs),
    )


def pair_proofs(answers: Sequence[Found], pair: Pair, allowed: Sequence[str]) -> dict[str, Proof]:
    """The proofs of a pair of processes, from the answers of all of them. Pure."""
    low, high = pair
    sides = _side(answers[low], high, allowed), _side(answers[high], low, allowed)
    proofs = {}
    for name in allowed:
        of_sides = [side[name] for side in sides if name in side]
        if of_sides:
            proofs[name] = merge(of_sides[0], of_sides[-1], pair)
    return proofs


def _side(found: Found, peer: int, allowed: Sequence[str]) -> dict[str, Proof]:
    """Proofs by transport, as one end of a pair sees them."""
    seen = found.peers.get(str(peer), PeerFound(rounds_left=1))
    problem = seen.problem
    if seen.rounds_left:
        problem = problem or f"the job failed before the exchanges were finished: {found.error}"
    state = "failed" if problem else "proven"
    proofs = {name: Proof(name, "refused", reason, ()) for name, reason in seen.refused}
    # A job that did not start has named no transport: the best allowed one counts as unproven.
    for name in seen.transports or allowed[:1]:
        proofs[name] = Proof(name, state, problem, tuple(seen.swaps))
    return {name: proof for name, proof in proofs.items() if name in allowed}


def _free_address(host: str) -> str:
    """An address of this machine with a port that is free now, for a coordinator."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return join_address(host, str(server.getsockname()[1]))


def merge(low: Proof, high: Proof, processes: Pair) -> Proof:
    """The common result of both sides for one transport."""
    sides = zip(processes, (low, high), strict=True)
    reasons = [f"process {process}: {side.reason}" for process, side in sides if side.reason]
    reason = low.reason if low.reason == high.reason else "; ".join(reasons)
    return Proof(low.transport, worst((low, high)).state, reason, low.swaps)


def _gather(message: Any) -> Sequence[Any]:
    """The messages of all processes, in the order of processes."""
    body = np.frombuffer(json.dumps(message).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array([body.size]))))
    padded = np.zeros(longest, np.uint8)
    padded[: body.size] = body
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row).rstrip(b"\0")) for row in np.asarray(rows)]
