"""`jaxhet doctor --qualify`: which transports carry bytes between two processes, and how fast.

The processes join as a job on CPU. Two at a time then make an engine of just these two, for one
transport after the other, and swap bytes through the exchange that programs use, jitted. All that
arrives is compared with what was sent. The other processes wait meanwhile.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxhet import _bootstrap, _config, _ffi, _initialize, _session
from jaxhet._coordinator import Claim
from jaxhet._errors import JaxhetError, TransportError, UsageError
from jaxhet._inspect.proofs import SCHEMA, PairProof, Proof, Qualification, Swap
from jaxhet.compiler import exchange

# Bytes -> how often. Around the engine's limits: eager messages up to 16 KiB, chunks of 512 KiB.
SIZES = {8: 200, 16 << 10: 100, (16 << 10) + 1: 100, (512 << 10) - 1: 40, 1 << 20: 40, 16 << 20: 8}
_DEADLINE_MS = 60_000  # of a swap
_CLOSE_TIMEOUT_MS = 5000


def qualify(arguments: Mapping[str, Any]) -> Qualification:
    """Joins the job as one of its processes, and proves all pairs; equal on every process.

    Args:
      arguments: Options of `jaxhet.initialize`; those that are not given come from the environment.

    Raises:
      UsageError: the job is not complete.
      JaxhetError: it could not be set up, or a process died.
    """
    jax.config.update("jax_platforms", "cpu")
    config = _config.resolve(arguments)
    if config.num_processes == 1:
        raise UsageError("a job of one process has nothing to prove; start doctor on several hosts")
    if not config.island and config.process_id is not None:
        arguments = {**arguments, "island": f"process{config.process_id}"}
    _initialize.initialize(**arguments)
    try:
        job = _Job(_session.required())
        try:
            return job.prove()
        finally:
            job.close()
    finally:
        _initialize.shutdown()


class _Job:
    """This process among those of the job."""

    def __init__(self, session: _session.Session):
        self._config = session.config
        self._process = session.process
        self._listener = _bootstrap.Listener(
            self._config.tcp_address or session.local_address,
            self._config.tcp_port,
            session.process,
            _initialize.read_secret(self._config),
        )
        if session.engine is None:  # which would have done it
            _ffi.register_handlers("cpu")
        claim = _initialize.make_claim(self._config, self._listener.address)
        self._claims = [Claim.from_json(c) for c in _gather(dataclasses.asdict(claim))]
        self._check: Callable[[], None] = session.raise_if_failed

    def close(self) -> None:
        self._listener.close()

    def prove(self) -> Qualification:
        pairs = tuple(
            self._prove_pair(*pair) for pair in itertools.combinations(range(len(self._claims)), 2)
        )
        states = [[proof.state for proof in pair.proofs] for pair in pairs]
        return Qualification(
            schema=SCHEMA,
            ok=all("proven" in pair and "failed" not in pair for pair in states),
            versions=self._claims[0].versions,
            pairs=pairs,
        )

    def _prove_pair(self, low: int, high: int) -> PairProof:
        """Every process calls it for every pair; those not in it wait."""
        own = []
        if self._process in (low, high):
            transports = [t for t in self._config.transports if t in _ffi.TRANSPORTS]
            own = [self._prove(t, low, high) for t in transports]
        answers = _gather([dataclasses.asdict(proof) for proof in own])
        members = (self._claims[low], self._claims[high])
        return PairProof(
            processes=(low, high),
            hosts=(members[0].host, members[1].host),
            same_host=members[0].host_id == members[1].host_id,
            proofs=tuple(
                merge(_proof(ours), _proof(theirs), (low, high))
                for ours, theirs in zip(answers[low], answers[high], strict=True)
            ),
        )

    def _prove(self, transport: str, low: int, high: int) -> Proof:
        try:
            engine = self._connect(transport, low, high)
        except JaxhetError as error:
            return Proof(transport, "refused", _refusal(str(error), transport), ())
        swaps = []
        try:
            for num_bytes, repeats in SIZES.items():
                swaps.append(_swap(engine, self._process == high, num_bytes, repeats))
        except (JaxhetError, jax.errors.JaxRuntimeError) as error:
            cause = engine.error() or error
            engine.fail("PeerError", str(cause))  # the other side need not wait
            return Proof(transport, "failed", f"{type(cause).__name__}: {cause}", tuple(swaps))
        finally:
            engine.close(_CLOSE_TIMEOUT_MS)
        return Proof(transport, "proven", "", tuple(swaps))

    def _connect(self, transport: str, low: int, high: int) -> _ffi.Engine:
        """The engine of a job of two: the lower process is 0 there, and rank 0."""
        pair = [self._claims[low], self._claims[high]]
        peer = high if self._process == low else low
        config = self._config
        sockets = _bootstrap.connect_peers(
            self._listener, pair, config.tcp_sockets, config.connect_timeout_s, self._check
        )
        engine = _ffi.Engine.start(
            _config.resolve(
                {
                    "process_id": int(self._process == high),
                    "num_processes": 2,
                    "transports": (transport,),
                }
            ),
            [dataclasses.replace(claim, process=i) for i, claim in enumerate(pair)],
            {int(peer == high): sockets[peer]},
        )
        engine.set_ranks(
            [(_device_of(process).id, i, i, "cpu") for i, process in enumerate((low, high))]
        )
        return engine


def _refusal(text: str, transport: str) -> str:
    """What the engine says of the one transport out of an error that lists them all."""
    _, found, rest = text.partition(f"; {transport}: ")
    return rest.partition("; ")[0] if found else text


def _device_of(process: int) -> Any:
    return next(d for d in jax.devices() if d.process_index == process)


def _swap(engine: _ffi.Engine, is_high: bool, num_bytes: int, repeats: int) -> Swap:
    """Sends other bytes each time, and compares what comes back."""
    swap = _compiled_swap(engine, num_bytes)
    times = []
    for repeat in range(1 + repeats):
        x = jax.device_put(pattern(is_high, num_bytes, repeat), jax.local_devices()[0])
        start = time.perf_counter()
        y = swap(x).block_until_ready()
        times.append(time.perf_counter() - start)
        wrong = np.count_nonzero(np.asarray(y) != pattern(not is_high, num_bytes, repeat))
        if wrong:
            raise TransportError(f"{wrong} of {num_bytes} bytes are not what was sent")
    p50_s = statistics.median(times[1:])  # the first one compiles
    return Swap(num_bytes, repeats, p50_s * 1e6, num_bytes / p50_s / 1e9)


def pattern(is_high: bool, num_bytes: int, repeat: int) -> np.ndarray:
    """What a side sends."""
    return _noise(is_high, num_bytes) + np.uint8(repeat % 256)


@functools.cache
def _noise(is_high: bool, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(int(is_high)).integers(0, 256, num_bytes, np.uint8)


def _compiled_swap(engine: _ffi.Engine, num_bytes: int) -> Callable[[jax.Array], jax.Array]:
    """A program that is one exchange: a permute between ranks 0 and 1."""
    plan = num_bytes  # any number that is the program's own on both sides
    engine.register_plan(plan, f"qualify u8[{num_bytes}] {{0,1}},{{1,0}}")
    call = jax.ffi.ffi_call(
        exchange.EXCHANGE_TARGET,
        jax.ShapeDtypeStruct((num_bytes,), np.uint8),
        has_side_effect=True,
    )
    attributes = {
        "session": np.int64(engine.session),
        "kind": np.int64(exchange.ExchangeKind.PERMUTE),
        "plan": np.int64(plan),
        "index": np.int64(0),
        "ranks": np.array([0, 1, 1, 0], np.int64),
        "group_size": np.int64(2),
        "deadline_ms": np.int64(_DEADLINE_MS),
    }
    return jax.jit(lambda x: call(x, **attributes))


def merge(low: Proof, high: Proof, processes: tuple[int, int]) -> Proof:
    """What both sides found of one transport."""
    worst = min(low, high, key=lambda side: ("failed", "refused", "proven").index(side.state))
    sides = zip(processes, (low, high), strict=True)
    reasons = [f"process {process}: {side.reason}" for process, side in sides if side.reason]
    reason = low.reason if low.reason == high.reason else "; ".join(reasons)
    return Proof(low.transport, worst.state, reason, low.swaps)


def _proof(fields: dict[str, Any]) -> Proof:
    return Proof(**{**fields, "swaps": tuple(Swap(**swap) for swap in fields["swaps"])})


def _gather(message: Any) -> Sequence[Any]:
    """What every process says, in their order."""
    body = np.frombuffer(json.dumps(message).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array([body.size]))))
    padded = np.zeros(longest, np.uint8)
    padded[: body.size] = body
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row).rstrip(b"\0")) for row in np.asarray(rows)]
