"""`jaxhet doctor --qualify`: which transports carry bytes between two processes, and how fast.

The processes join as a job on CPU. Two at a time then make an engine of just these two, for one
transport after the other, and swap bytes through the exchange that programs use, jitted. All that
arrives is compared with what was sent. Where RDMA works, each process also has its NICs send what
its GPUs write, while these are busy. The other processes wait meanwhile. First, a process that is
alone on its host is both ends of a pair, for jobs that will have more there.
"""

import collections
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxhet import _clusters, _config, _ffi, _initialize, _session, _set_up
from jaxhet._doctor import links
from jaxhet._errors import JaxhetError, TransportError, UsageError
from jaxhet._gpu import nearby
from jaxhet._job import bootstrap
from jaxhet._job import listener as _listener
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.proofs import SCHEMA, PairProof, Proof, Qualification, Swap, worst
from jaxhet._net import secret as _secret
from jaxhet.compiler import ExchangeKind, carrier, exchange

# Bytes -> how often. Around the engine's limits: eager messages up to 16 KiB, chunks of 512 KiB.
SIZES = {8: 200, 16 << 10: 100, (16 << 10) + 1: 100, (512 << 10) - 1: 40, 1 << 20: 40, 16 << 20: 8}
_GPU_ROUNDS = 300  # writes of a GPU that a NIC sends
_DEADLINE_MS = 60_000  # longest wait of a swap
_CLOSE_TIMEOUT_MS = 5000
_ELSEWHERE = -1  # the id of no device


def qualify(arguments: Mapping[str, Any]) -> tuple[int, Qualification]:
    """Joins the job as one of its processes, and proves all pairs.

    Args:
      arguments: Options of `jaxhet.initialize`; those that are not given come from the environment.

    Returns:
      The number of this process, and what was proven, which is equal on every process.

    Raises:
      UsageError: the job is not complete.
      JaxhetError: it could not be set up, or a process died.
    """
    jax.config.update("jax_platforms", "cpu")
    arguments = {**arguments, "qualification": ""}  # an older report does not bind this one
    config, _ = _clusters.resolve(arguments)
    if config.num_processes == 1:
        raise UsageError("a job of one process has nothing to prove; start doctor on several hosts")
    if not config.island and config.process_id is not None:
        arguments = {**arguments, "island": f"process{config.process_id}"}
    _initialize.initialize(**arguments)
    try:
        session = _session.required()
        job = _Job(session)
        try:
            return session.process, job.prove()
        finally:
            job.close()
    finally:
        _initialize.shutdown()


@dataclasses.dataclass(frozen=True)
class _End:
    """One end of a pair.

    Attributes:
      side: 0 or 1; its process and its rank in a job of just these two.
      infos: Descriptions of both ends, by side.
      listener: This end's.
    """

    side: int
    infos: Sequence[ProcessInfo]
    listener: _listener.Listener


class _Job:
    """This process among those of the job."""

    def __init__(self, session: _session.Session):
        self._config = session.config
        self._process = session.process
        self._host = self._config.tcp_address or session.local_address
        self._id = session.job
        self._listener = self._listen(session.process, self._config.tcp_port)
        if session.engine is None:  # which would have done it
            _ffi.register_handlers("cpu")
        info = _set_up.make_process_info(self._config, self._listener.address)
        self._infos = [ProcessInfo.from_json(c) for c in _gather(dataclasses.asdict(info))]
        self._transports = [t for t in self._config.transports if t in _ffi.TRANSPORTS]
        self._check: Callable[[], None] = session.raise_if_failed

    def close(self) -> None:
        self._listener.close()

    def prove(self) -> Qualification:
        written = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        pairs = (
            *self._prove_loopbacks(),
            *(self._prove_pair(*pair) for pair in itertools.combinations(self._infos, 2)),
        )
        states = [[proof.state for proof in pair.proofs] for pair in pairs]
        return Qualification(
            schema=SCHEMA,
            ok=all("proven" in pair and "failed" not in pair for pair in states),
            versions=self._infos[0].versions,
            written=_gather(written)[0],
            pairs=pairs,
        )

    def _listen(self, process: int, port: int) -> _listener.Listener:
        secret = _secret.read_secret(self._config)
        listener = _listener.Listener(self._host, port, process, secret, self._id)
        listener.reconnects = True  # once for each transport
        return listener

    def _prove_loopbacks(self) -> list[PairProof]:
        """Every process calls it; those that are alone on their hosts try both ends."""
        sizes = collections.Counter(info.host_id for info in self._infos)
        alone = [info for info in self._infos if sizes[info.host_id] == 1]
        own = self._infos[self._process]
        answers = _gather(self._prove_loopback(own) if own in alone else [])
        return [_pair(c, c, map(Proof.from_json, answers[c.process])) for c in alone]

    def _prove_loopback(self, own: ProcessInfo) -> list[dict[str, Any]]:
        listeners = [self._listen(side, 0) for side in range(2)]
        infos = [dataclasses.replace(own, process=x.process, address=x.address) for x in listeners]
        ends = [_End(x.process, infos, x) for x in listeners]
        proofs = []
        try:
            with concurrent.futures.ThreadPoolExecutor(len(ends)) as pool:
                for transport in self._transports:
                    low, high = pool.map(functools.partial(self._prove, transport), ends)
                    proofs.append(merge(low, high, (own.process, own.process)))
        finally:
            for listener in listeners:
                listener.close()
        return [dataclasses.asdict(proof) for proof in proofs]

    def _prove_pair(self, low: ProcessInfo, high: ProcessInfo) -> PairProof:
        """Every process calls it for every pair; those not in it wait."""
        own = []
        pair = (low, high)
        processes = (low.process, high.process)
        if self._process in processes:
            end = _End(processes.index(self._process), pair, self._listener)
            own = [self._prove(transport, end) for transport in self._transports]
        answers = _gather([dataclasses.asdict(proof) for proof in own])
        ours, theirs = (map(Proof.from_json, answers[process]) for process in processes)
        both = zip(ours, theirs, strict=True)
        return _pair(low, high, (merge(one, other, processes) for one, other in both))

    def _prove(self, transport: str, end: _End) -> Proof:
        try:
            engine = self._connect(transport, end)
        except JaxhetError as error:
            return Proof(transport, "refused", _refusal(str(error), transport), ())
        swaps = []
        try:
            for num_bytes, repeats in SIZES.items():
                swaps.append(_swap(engine, end.side == 1, num_bytes, repeats))
            if transport == "verbs" and self._problem_of_gpus:
                raise TransportError(self._problem_of_gpus)
        except (JaxhetError, jax.errors.JaxRuntimeError) as error:
            cause = engine.error() or error
            engine.fail("PeerError", str(cause))  # the other side need not wait
            return Proof(transport, "failed", f"{type(cause).__name__}: {cause}", tuple(swaps))
        finally:
            engine.close(_CLOSE_TIMEOUT_MS)
        return Proof(transport, "proven", "", tuple(swaps), self._link(transport, end))

    @functools.cached_property
    def _problem_of_gpus(self) -> str:
        """Error of NICs that sent other bytes than this process's GPUs wrote, or ""."""
        try:
            for platform, vendor in _ffi.VENDORS.items():
                for gpu in nearby.own_gpus(self._config, platform):
                    _ffi.prove_sends(self._config, vendor, gpu["ordinal"], _GPU_ROUNDS)
        except TransportError as error:
            return str(error)
        return ""

    def _connect(self, transport: str, end: _End) -> _ffi.Engine:
        """The engine of a job of two."""
        config = self._config
        sockets = bootstrap.connect_peers(
            end.listener, end.infos, config.tcp_sockets, config.connect_timeout_s, self._check
        )
        options = {"transports": (transport,), "encryption": config.encryption}
        engine = _ffi.Engine.start(
            _config.resolve(options).placed(end.side, 2),
            [dataclasses.replace(info, process=side) for side, info in enumerate(end.infos)],
            {1 - end.side: sockets[end.infos[1 - end.side].process]},
        )
        own = jax.local_devices()[0].id
        engine.set_ranks([(own if i == end.side else _ELSEWHERE, i, i, "cpu") for i in range(2)])
        return engine

    def _link(self, transport: str, end: _End) -> float | None:
        peer, own = end.infos[1 - end.side], end.infos[end.side]
        if peer.host_id == own.host_id:
            return None
        return links.link_gb_per_s(self._config, transport, peer.address)


def _pair(low: ProcessInfo, high: ProcessInfo, proofs: Iterable[Proof]) -> PairProof:
    return PairProof(
        processes=(low.process, high.process),
        hosts=(low.host, high.host),
        same_host=low.host_id == high.host_id,
        proofs=tuple(proofs),
    )


def _refusal(text: str, transport: str) -> str:
    """The engine's words about one transport, from an error that lists all of them."""
    _, found, rest = text.partition(f"; {transport}: ")
    return rest.partition("; ")[0] if found else text


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
    """The bytes that a side sends."""
    return _noise(is_high, num_bytes) + np.uint8(repeat % 256)


@functools.cache
def _noise(is_high: bool, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(int(is_high)).integers(0, 256, num_bytes, np.uint8)


def _compiled_swap(engine: _ffi.Engine, num_bytes: int) -> Callable[[jax.Array], jax.Array]:
    """A program that is one exchange: a permute between ranks 0 and 1."""
    plan = num_bytes  # any number that is the program's own on both sides
    swap = exchange.Movement(ExchangeKind.PERMUTE, (0, 1, 1, 0), 2, _DEADLINE_MS)
    engine.register_plan(plan, f"qualify u8[{num_bytes}] {{0,1}},{{1,0}}", [swap])
    call = jax.ffi.ffi_call(
        carrier.EXCHANGE_TARGET,
        jax.ShapeDtypeStruct((num_bytes,), np.uint8),
        has_side_effect=True,
    )
    given = dataclasses.asdict(exchange.Call(engine.session, plan))
    attributes = {name: np.asarray(value, np.int64)[()] for name, value in given.items()}
    return jax.jit(lambda x: call(x, **attributes))


def merge(low: Proof, high: Proof, processes: tuple[int, int]) -> Proof:
    """The common result of both sides for one transport."""
    sides = zip(processes, (low, high), strict=True)
    reasons = [f"process {process}: {side.reason}" for process, side in sides if side.reason]
    reason = low.reason if low.reason == high.reason else "; ".join(reasons)
    rates = [side.link_gb_per_s for side in (low, high) if side.link_gb_per_s is not None]
    link = min(rates, default=None)
    return Proof(low.transport, worst((low, high)).state, reason, low.swaps, link)


def _gather(message: Any) -> Sequence[Any]:
    """The messages of all processes, in their order."""
    body = np.frombuffer(json.dumps(message).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array([body.size]))))
    padded = np.zeros(longest, np.uint8)
    padded[: body.size] = body
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row).rstrip(b"\0")) for row in np.asarray(rows)]
