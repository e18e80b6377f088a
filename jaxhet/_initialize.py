"""`jaxhet.initialize` and `jaxhet.shutdown`."""

import atexit
import collections
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxhet import (
    _clusters,
    _distributed,
    _ffi,
    _islands,
    _log,
    _memory,
    _qualification,
    _session,
    compiler,
)
from jaxhet._config import Config
from jaxhet._errors import JaxhetError, PeerError, UsageError
from jaxhet._gpu import gpu_settings, nearby, tuning
from jaxhet._gpu.topology_mirror import TopologyMirror
from jaxhet._jax import compat, compiler_settings, jaxlib, programs
from jaxhet._jax.compat import Device
from jaxhet._job import bootstrap, coordinator, exposure
from jaxhet._job import connector as _connector
from jaxhet._job import listener as _listener
from jaxhet._job import membership as _membership
from jaxhet._job import place as _place
from jaxhet._job.membership import Membership
from jaxhet._job.process_info import ProcessInfo, differences_between_islands
from jaxhet._log import LOGGER
from jaxhet._net import credentials
from jaxhet._net import interfaces as _interfaces
from jaxhet._net.secret import read_secret
from jaxhet._telemetry import metrics as _metrics
from jaxhet._telemetry import trace as _trace
from jaxhet._traced import jaxprs

_used = threading.Event()  # this process is or was in a job


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    island: str | None = None,
    **options: Any,
) -> None:
    """Joins this process to the job, in place of `jax.distributed.initialize()`.

    Call it before any JAX computation. Arguments that are not given are read from environment
    variables: `JAXHET_*`, which `jaxhet launch` sets, then JAX's own, then the variables of the
    scheduler that started this process (`jaxhet env` prints what was found).

    Args:
      coordinator_address: host:port. Without `jaxhet launch`, process 0 starts the coordinator
        there.
      num_processes: number of processes of the job.
      process_id: this process, 0 … num_processes - 1.
      island: name of this process's island; default: its platform. All processes declare one, or
        none.
      **options: any other option of `jaxhet._options.OPTIONS` (docs/reference/options.md).

    Raises:
      UsageError: the job, an option or the installation is not right; the text says what to
        change.
      PeerError: a process died while the job was set up.
      TransportError: a process could not be reached.

    Examples:
      In a program that `jaxhet launch` starts:

      >>> import jax, jaxhet
      >>> jaxhet.initialize()
      >>> print(jax.process_index(), jaxhet.islands())
    """
    started_s = time.monotonic()
    session = _session.current()
    if session is not None and session.is_pretended:
        return
    config, detected = _clusters.resolve(
        {
            "coordinator_address": coordinator_address,
            "num_processes": num_processes,
            "process_id": process_id,
            "island": island,
            **options,
        }
    )
    _log.apply(config)
    _check_first_call()
    compat.require_supported_jax()
    config = _place.complete(config, detected.hints)
    secret = read_secret(config)
    os.environ.pop("JAXHET_JOB_SECRET", None)  # programs that this process starts do not need it
    _used.set()
    platform = compat.expected_platform()
    if platform == "cpu":
        compat.configure_cpu(config.cpu_devices)
        if config.cpu_keep_memory:
            _memory.keep_freed_memory()
    elif config.local_device_ids:
        compat.use_gpus(platform, config.local_device_ids)
    trace = _trace.Trace(config) if config.trace_folder else None
    metrics = _metrics.Metrics(config) if _metrics.are_wanted(config) else None
    membership = _join_coordinator(config, secret)
    try:
        session = _set_up(config, secret, membership)
        if trace is not None:
            trace.follow(session, membership)
            session.trace = trace
        if metrics is not None:
            session.metrics = metrics
            metrics.follow(session)
    except BaseException as error:
        if metrics is not None:
            metrics.close()
        if isinstance(error, JaxhetError) and membership.failure is None:
            membership.report(type(error)(f"{_place.name(config)}: {error}"))
        membership.leave(close=False)  # JAX's client, if there is one, lives as long as the process
        raise
    _session.install(session)
    _distributed.take_over(jax.distributed)
    os.register_at_fork(after_in_child=session.abandon_in_child)
    atexit.register(_shutdown_at_exit)
    session.events.joined(time.monotonic() - started_s)


def shutdown() -> None:
    """Leaves the job.

    Waits until every process has called it or failed, then closes all connections. Idempotent.
    Runs at interpreter exit too. After a failure of the job it does not wait.
    """
    session = _session.remove()
    if session is not None:
        session.close(session.config.shutdown_timeout_s)


def has_joined() -> bool:
    """Whether this process is or was in a job."""
    return _used.is_set()


def _shutdown_at_exit() -> None:
    session = _session.remove()
    if session is not None:
        session.close_at_exit(session.config.shutdown_timeout_s)


def _check_first_call() -> None:
    if _session.current() is not None:
        raise UsageError("jaxhet.initialize was called before in this process; call it once")
    if _used.is_set():
        raise UsageError(
            "this process has joined or tried to join a job already; start a new process for the"
            " next one"
        )
    if compat.distributed_is_initialized():
        raise UsageError(
            "jax.distributed.initialize was called; call jaxhet.initialize in its place"
        )
    if compat.backend_exists():
        raise UsageError(
            "a JAX backend exists already; call jaxhet.initialize before any JAX computation"
        )


def _join_coordinator(config: Config, secret: bytes) -> Membership:
    address = config.coordinator_address
    if config.process_id == 0 and not config.launched:
        _start_sidecar(config, secret)
    try:
        return _membership.connect(address, secret, config.connect_timeout_s)
    except ConnectionRefusedError as error:
        raise UsageError(
            f"no coordinator answers on {address} within {config.connect_timeout_s:g} s"
            f" ({error}); start process 0, or set JAXHET_COORDINATOR_ADDRESS to where it runs. If"
            " the job is complete already, this process is one too many, or has come too late: a"
            " coordinator listens until all processes have come"
        ) from error


def _start_sidecar(config: Config, secret: bytes) -> None:
    """Starts the coordinator in a process of its own, which outlives this one."""
    root = str(pathlib.Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        coordinator.command(
            config.coordinator_bind_address or config.coordinator_address,
            config.num_processes,
            config.connect_timeout_s,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            **coordinator.QUIET,
            "PYTHONPATH": path,
            "JAXHET_JOB_SECRET": secret.decode(),
            **{name.upper(): value or "" for name, value in compat.mtls_settings().items()},
        },
    )
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if answer != "ready":
        code = process.wait()
        raise UsageError(
            answer.removeprefix("error ")
            or f"the coordinator of the job ended with exit code {code} before it listened; its"
            " output on stderr says why"
        )
    _sidecars.append(process)


# Kept so that its pipe stays open as long as this process lives.
_sidecars: list[subprocess.Popen[str]] = []


def _set_up(config: Config, secret: bytes, membership: Membership) -> _session.Session:
    local_host = config.tcp_address or membership.local_address
    process = _place.UNASSIGNED if config.process_id is None else config.process_id
    interfaces = _interfaces.chosen(
        config,
        local_host,
        lambda: nearby.interface_distances(config, compat.expected_platform()),
    )
    listener = _listener.Listener(
        local_host, config.tcp_port, process, secret, interfaces=interfaces
    )
    engine: _ffi.Engine | None = None
    connector: _connector.Connector | None = None
    tuned: pathlib.Path | None = None
    try:
        given = credentials.given(compat.mtls_settings())
        info = make_process_info(config, listener.address, listener.interfaces)
        membership.join(info, config.connect_timeout_s + 5, given)
        members = membership.members
        config = config.placed(membership.process, len(members))
        per_pair = _ffi.CHANNEL_MESSAGE_SOCKETS + config.device_channel_sockets
        channels = bootstrap.num_channels(len(members), per_pair)
        listener.assign(membership.process, membership.job, len(members), channels)
        differences = differences_between_islands(members)
        if config.process_id == 0:
            for line in differences:
                LOGGER.warning("%s", line)
        if len({info.island for info in members}) > 1:
            if config.disable:
                raise UsageError("JAXHET_DISABLE is for jobs of one island; this one has several")
            exposure.check(config, config.process_id, members, membership.coordinator_host)
            if members[config.process_id].platform in jaxlib.GPU_PLATFORMS:
                tuned = _prepare_gpus(config.process_id)
            engine, connector = _start_engine(config, listener, membership)
        session = _start_jax(config, membership, engine, listener)
        session.compilation.connector = connector
        session.settings_differences = tuple(differences)
        if tuned is not None:
            _share_tuning(session, membership, tuned)
        if connector is None:
            listener.close()
        return session
    except BaseException:
        if engine is not None:
            engine.close(0)
        listener.close()
        raise


def _prepare_gpus(process: int) -> pathlib.Path | None:
    """Completes XLA's flags; returns the folder for tuned kernels, if processes share them."""
    given = os.environ.get("XLA_FLAGS", "")
    cache = jax.config.jax_compilation_cache_dir
    folder = gpu_settings.prepare(lambda: tuning.folder(process, cache))
    if process == 0:
        LOGGER.info("%s", gpu_settings.added(given, os.environ["XLA_FLAGS"]))
    return folder


def _share_tuning(session: _session.Session, membership: Membership, folder: pathlib.Path) -> None:
    """Has this process load the tuned kernels of the first process with such devices, or tell."""
    kinds: dict[int, list[str]] = {}
    for island in session.islands:
        for device in island.devices:
            kinds.setdefault(device.process_index, []).append(device.device_kind)

    def tuning_class(info: ProcessInfo) -> tuple[object, ...]:
        return info.platform, kinds.get(info.process), info.versions, info.settings

    mine = tuning_class(membership.members[session.process])
    session.compilation.tuning = tuning.Tuning(
        folder,
        [info.process for info in membership.members if tuning_class(info) == mine],
        session.process,
        membership.tell_tuned,
        session.config.tuning_timeout_s,
        key=hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).hexdigest(),
    )
    membership.listen_tuned(session.compilation.tuning.hear)


def make_process_info(
    config: Config, address: str, interfaces: Sequence[_interfaces.Interface] = ()
) -> ProcessInfo:
    """Description of this process for its peers.

    Args:
      config: The options.
      address: host:port to which peers connect.
      interfaces: Interfaces to which peers may connect for data.
    """
    jax_platform = compat.expected_platform()
    pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessInfo(
        process=_place.UNASSIGNED if config.process_id is None else config.process_id,
        num_processes=config.num_processes or _place.UNASSIGNED,
        island_process=config.island_process_id,
        island=config.island or jax_platform,
        is_declared=bool(config.island),
        islands=tuple(config.islands),
        platform=jax_platform,
        topology=(jax_platform, jax_platform),
        has_cpu=compat.has_cpu_backend(),
        host=platform.node() or socket.gethostname(),
        host_id=f"{boot_id}/{pid_namespace}/{os.getuid()}",
        pid=os.getpid(),
        address=config.tcp_advertise or address,
        versions={**compat.versions(), "jaxhet": importlib.metadata.version("jaxhet")},
        options=config.agreed(),
        settings=compiler_settings.settings(),
        interfaces=tuple(interface.announced() for interface in interfaces),
    )


def _start_engine(
    config: Config, listener: _listener.Listener, membership: Membership
) -> tuple[_ffi.Engine, _connector.Connector | None]:
    """The engine, and what connects further peers, if there may be any."""
    members = membership.members
    refused = _qualification.refusals(config, members)

    sockets, timeout_s = config.tcp_sockets, config.connect_timeout_s

    def start(peers: Sequence[ProcessInfo]) -> _ffi.Engine:
        first = bootstrap.connect_peers(listener, peers, sockets, timeout_s, membership.check)
        return _ffi.Engine.start(config, members, first, refused)

    if _connector.connects_all(config.connect, members):
        return start(members), None
    first = _connector.partners(config.process_id, members)
    engine = start([members[process] for process in sorted(first)])

    def open_peer(info: ProcessInfo, check: Callable[[], None]) -> None:
        peer = bootstrap.connect_peers(
            listener, [info], sockets, timeout_s, check, is_patient=True
        )[info.process]
        engine.join_peer(config, members, info.process, peer, refused.get(info.process, {}))

    connector = _connector.Connector(
        listener,
        members,
        first,
        _connector.Opener(open_peer, lambda info: bootstrap.has_come(listener, info, sockets)),
        membership,
        timeout_s,
    )
    connector.start(lambda error: engine.fail(type(error).__name__, str(error)))
    return engine, connector


def _start_jax(
    config: Config,
    membership: Membership,
    engine: _ffi.Engine | None,
    listener: _listener.Listener,
) -> _session.Session:
    members = membership.members

    def check() -> None:
        membership.check()
        if engine is not None and (error := engine.error()):
            raise error

    places = [_islands.Member(c.process, c.island, c.platform, c.host) for c in members]
    partition = _partition(config, places)
    if partition is not None:
        compat.set_partition_index(partition)
    client = compat.run_with_checks(
        lambda: compat.connect_client(
            membership.service_address,
            config.num_processes,
            config.process_id,
            membership.credentials,
        ),
        check,
    )
    compat.bind_gloo(client, membership.local_address)
    devices = _create_backend(client, config.process_id, members, check)
    islands = _islands.make_islands(places, devices)
    session = _session.Session(config, config.process_id, islands, engine, membership)
    if engine is not None:
        try:
            _set_ranks(session, engine)
            if session.island.platform in jaxlib.GPU_PLATFORMS:
                _open_devices(session, engine, members, listener, check)
            _bridge(session, devices)
        except BaseException:
            session.discard()
            raise
    return session


def _partition(config: Config, places: Sequence[_islands.Member]) -> int | None:
    """JAX's partition (slice) of this process: the user's, else its island's index.

    None in a job of one island: XLA then makes a partition of each host.
    """
    if config.partition_index is not None:
        return config.partition_index
    names = _islands.names(places)
    mine = next(place.island for place in places if place.process == config.process_id)
    return names.index(mine) if len(names) > 1 else None


def _create_backend(
    client: Any, process: int, members: list[ProcessInfo], check: Callable[[], None]
) -> list[Device]:
    """Creates JAX's backends: all processes exchange their topologies."""
    topologies = dict.fromkeys([("cpu", "cpu"), *(info.topology for info in members)])
    mirror = TopologyMirror(client, members) if process == 0 else None

    def check_and_unblock() -> None:
        try:
            check()
            if mirror is not None:
                mirror.check()
        except JaxhetError:
            compat.unblock_backend(client, topologies, range(len(members)))
            time.sleep(0.2)
            raise

    try:
        devices = compat.run_with_checks(jax.devices, check_and_unblock)
    except RuntimeError as error:
        check()
        raise PeerError(
            f"a backend did not start, or the processes could not exchange their devices: {error}"
        ) from error
    if mirror is not None:
        mirror.finish()
    return devices


def _set_ranks(session: _session.Session, engine: _ffi.Engine) -> None:
    engine.set_ranks(
        [
            (device.id, device.process_index, island.index, island.platform)
            for island, device in _islands.by_rank(session.islands).values()
        ]
    )


def _bridge(session: _session.Session, devices: list[Device]) -> None:
    """Lets XLA know the engine and the passes. Last of all: XLA forgets nothing."""
    platform = session.island.platform
    _ffi.register_handlers(platform)
    attribute, own = compiler.PROGRAM_ATTRIBUTE, session.compilation
    programs.watch_lowering(jaxprs.labels, jaxprs.argument_labels, own.describe, attribute)
    programs.guard_launches(attribute, own.is_bridged, own.check_launch, own.accept_deserialized)
    own.own_launches()
    compat.register_passes(own.decompose, own.bridge, platform)
    counts = collections.Counter(d.process_index for d in devices)
    if len(set(counts.values())) > 1:
        compat.allow_unequal_processes()
    compat.guard_compilation_cache(own.cache_salt, own.accept_cached, own.writes_cache)


def _open_devices(
    session: _session.Session,
    engine: _ffi.Engine,
    members: list[ProcessInfo],
    listener: _listener.Listener,
    check: Callable[[], None],
) -> None:
    """Opens this process's GPUs, and the device channels between them and all others."""
    config = session.config
    ranks = {rank: device for rank, (_, device) in _islands.by_rank(session.islands).items()}
    mine = [rank for rank, d in ranks.items() if d.process_index == session.process]
    host = members[session.process].host_id

    def needs_sockets(info: ProcessInfo) -> bool:
        shares_memory = info.host_id == host and "shm" in config.transports
        return not shares_memory and not {"tcp", "verbs"}.isdisjoint(config.transports)

    sockets = bootstrap.connect_device_channels(
        listener,
        {
            (rank, other): members[device.process_index]
            for rank in mine
            for other, device in ranks.items()
            if device.process_index != session.process
            and needs_sockets(members[device.process_index])
        },
        len(ranks),
        _ffi.CHANNEL_MESSAGE_SOCKETS + config.device_channel_sockets,
        config.connect_timeout_s,
        check,
    )
    # XLA's other arrays will lie where these do.
    proofs = {rank: compat.memory_on(ranks[rank], _ffi.PROOF_BYTES * len(ranks)) for rank in mine}
    engine.open_devices(
        session.island.platform,
        [
            (
                rank,
                ranks[rank].local_hardware_id,
                proofs[rank].unsafe_buffer_pointer(),
                proofs[rank].nbytes if config.zero_copy else 0,
            )
            for rank in mine
        ],
        sockets,
        config.connect_timeout_s,
    )
