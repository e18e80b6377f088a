"""Set-up of a process that reached the coordinator: peers, engine, JAX's backends, devices."""

import collections
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxhet import (
    _compilation,
    _device_channels,
    _device_put,
    _ffi,
    _islands,
    _qualification,
    _session,
    compiler,
)
from jaxhet._config import Config, PlacedConfig
from jaxhet._device_channels import ChannelPlan
from jaxhet._errors import JaxhetError, PeerError, UsageError
from jaxhet._gpu import gpu_settings
from jaxhet._gpu.own_gpus import own_gpus
from jaxhet._gpu.topology_mirror import TopologyMirror
from jaxhet._jax import (
    compat,
    compiler_settings,
    jaxlib,
    multihost,
    platforms,
    programs,
    shared_programs,
    slices,
)
from jaxhet._jax.compat import Device
from jaxhet._job import bootstrap, exposure
from jaxhet._job import connector as _connector
from jaxhet._job import listener as _listener
from jaxhet._job import place as _place
from jaxhet._job.membership import Membership
from jaxhet._job.process_info import PLUGIN, ProcessInfo, differences_between_islands
from jaxhet._log import LOGGER
from jaxhet._net import interfaces as _interfaces
from jaxhet._traced import jaxprs


def set_up(config: Config, secret: bytes, membership: Membership) -> _session.Session:
    """Joins the job, connects the peers, and starts engine and JAX.

    Args:
      config: The options.
      secret: The job secret.
      membership: The connection to the coordinator, over which the process has not joined yet.

    Returns:
      The session. Before an error is raised, everything that was opened is closed.
    """
    local_host = config.socket_address or membership.local_address
    process = _place.UNASSIGNED if config.process_id is None else config.process_id
    interfaces = _interfaces.chosen(config, local_host)
    listener = _listener.Listener(
        local_host, config.socket_port, process, secret, interfaces=interfaces
    )
    try:
        placed = _join(config, listener, membership)
        job = _connect(placed, listener, membership)
    except BaseException:
        listener.close()
        raise
    try:
        session = _start_jax(job)
    except BaseException:
        if job.engine is not None:
            job.engine.close(0)
        listener.close()
        raise
    if session.compilation.parts.connector is None:
        listener.close()
    return session


@dataclasses.dataclass(frozen=True)
class _Job:
    """The job as it is before JAX starts; in a job of one island the engine is None."""

    config: PlacedConfig
    membership: Membership
    listener: _listener.Listener
    engine: _ffi.Engine | None = None
    connected: frozenset[int] = frozenset()  # processes that are connected from the start
    settings_differences: tuple[str, ...] = ()
    shares_programs: bool = False

    def check(self) -> None:
        """Raises the failure of the job, if there is one."""
        self.membership.check()
        if self.engine is not None and (error := self.engine.error()):
            raise error


def _join(config: Config, listener: _listener.Listener, membership: Membership) -> PlacedConfig:
    """Waits until all processes have joined; completes the options."""
    info = make_process_info(config, listener.address, listener.interfaces)
    membership.join(info, config.connect_timeout_s + 5, config.peer_timeout_s)
    members = membership.members
    listener.assign(membership.process, membership.job, len(members))
    are_deterministic = all(
        compiler_settings.are_kernels_deterministic(info.settings) for info in members
    )
    placed = config.placed(membership.process, len(members))
    return placed.filled({"one_world_kernels": are_deterministic})


def _connect(config: PlacedConfig, listener: _listener.Listener, membership: Membership) -> _Job:
    """Connects this process to its peers; in a job of one island there is nothing to connect."""
    members = membership.members
    differences = tuple(differences_between_islands(members))
    if config.process_id == 0:
        for line in (jaxlib.untested(jax.__version__), *differences):
            if line:
                LOGGER.warning("%s", line)
    if len({info.island for info in members}) == 1:
        return _Job(config, membership, listener, settings_differences=differences)
    exposure.check(config, config.process_id, members, membership.coordinator_host)
    has_gpus = members[config.process_id].platform in jaxlib.GPU_PLATFORMS
    shares_programs = has_gpus and _prepare_gpus(config, members)
    connected = frozenset(range(len(members))) - {config.process_id}
    if not _connector.connects_all(config.connect, members):
        connected = frozenset(_connector.partners(config.process_id, members))
    engine = _start_engine(config, listener, membership, connected)
    return _Job(config, membership, listener, engine, connected, differences, shares_programs)


def _prepare_gpus(config: PlacedConfig, members: Sequence[ProcessInfo]) -> bool:
    """Completes the environment; returns whether processes with equal GPUs share programs."""
    process = config.process_id
    own_platform = members[process].platform
    queues = gpu_settings.give_queues_to_streams(own_platform)
    given = os.environ.get("XLA_FLAGS", "")
    are_shared = gpu_settings.prepare()
    if all(info.platform != own_platform for info in members[:process]):
        LOGGER.info("%s", gpu_settings.added(given, os.environ["XLA_FLAGS"]))
        if queues:
            LOGGER.info("%s", queues)
        if are_shared:
            LOGGER.info(
                "processes with equal GPUs run the executable of the first of them, because XLA's"
                " autotuning may choose other kernels in each process"
            )
        if config.one_world_kernels:
            LOGGER.info(
                "one_world_kernels is on: XLA compiles the kernels of one NCCL world, for equal"
                " bits, and fewer exchanges overlap (default with deterministic kernels)"
            )
    return are_shared


def _shared(config: PlacedConfig, membership: Membership) -> shared_programs.SharedPrograms:
    """Makes the first process of a tuning class compile programs, and the others load them."""
    process = config.process_id

    def tuning_class(info: ProcessInfo) -> tuple[object, ...]:
        return info.platform, info.gpus, info.versions, info.settings

    mine = tuning_class(membership.members[process])
    equal = [info.process for info in membership.members if tuning_class(info) == mine]
    store, timeout_s = compat.coordination_client(), config.tuning_timeout_s
    return shared_programs.SharedPrograms(equal, process, store, timeout_s)


def make_process_info(
    config: Config, address: str, interfaces: Sequence[_interfaces.Interface] = ()
) -> ProcessInfo:
    """Description of this process for its peers.

    Args:
      config: The options.
      address: host:port to which peers connect.
      interfaces: Interfaces to which peers may connect for data.
    """
    jax_platform = platforms.expected_platform()
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
        has_cpu=platforms.has_cpu_backend(),
        host=platform.node() or socket.gethostname(),
        host_id=f"{boot_id}/{pid_namespace}/{os.getuid()}",
        pid=os.getpid(),
        address=config.socket_advertise or address,
        versions={
            **compat.versions(),
            "jaxhet": importlib.metadata.version("jaxhet"),
            **({PLUGIN: plugin} if (plugin := platforms.plugin()) else {}),
        },
        options=config.agreed(),
        settings=compiler_settings.settings(),
        interfaces=tuple(interface.announced() for interface in interfaces),
        gpus=tuple(gpu["model"] for gpu in own_gpus(config, jax_platform)),
        partition_index=config.partition_index,
    )


def _data_sockets(members: Sequence[ProcessInfo]) -> int:
    """Smallest number of data sockets between two processes.

    A multiple of the number of interface pairs; more sockets where the round trip is long.
    """
    # Data between GPUs moves over device channels, not between processes.
    on_gpus = all(info.platform in jaxlib.GPU_PLATFORMS for info in members)
    return 0 if on_gpus else 2


def _start_engine(
    config: PlacedConfig,
    listener: _listener.Listener,
    membership: Membership,
    connected: Iterable[int],
) -> _ffi.Engine:
    members = membership.members
    refused = _qualification.refusals(config, members)
    peers = bootstrap.connect_peers(
        listener,
        [members[process] for process in sorted(connected)],
        _data_sockets(members),
        config.connect_timeout_s,
        membership.check,
    )
    return _ffi.Engine.start(config, members, peers, refused)


def _make_connector(
    job: _Job, engine: _ffi.Engine, channels: ChannelPlan | None
) -> _connector.Connector | None:
    """The connector of connections and channels that are opened later; None if there are none.

    Args:
      job: The job.
      engine: The engine of this process.
      channels: Device channels; None if the job has none.
    """
    config, listener, members = job.config, job.listener, job.membership.members
    timeout_s, sockets = config.connect_timeout_s, _data_sockets(members)
    is_whole = {
        process for process in job.connected if not channels or not channels.later_with(process)
    }
    if len(is_whole) == len(members) - 1:
        return None

    def open_peer(info: ProcessInfo, check: Callable[[], None]) -> None:
        process = info.process
        pairs = channels.later_with(process) if channels else []
        links = []
        if channels and pairs:
            wanted, num_ranks = channels.sockets_of(pairs, members), len(channels.process_of)
            links = bootstrap.connect_device_channels(listener, wanted, num_ranks, timeout_s, check)
        if process not in job.connected:
            peers = bootstrap.connect_peers(listener, [info], sockets, timeout_s, check)
            engine.join_peer(process, peers[process])
        if pairs:
            engine.open_channels(pairs, links, timeout_s)

    return _connector.Connector(listener, members, is_whole, open_peer, job.membership)


def _start_jax(job: _Job) -> _session.Session:
    """Starts JAX's client and backends, then the session."""
    config, membership, engine = job.config, job.membership, job.engine
    members = membership.members
    _set_partitions(config, members, _islands.names(members))
    client, relay = _connect_client(job)
    membership.when_lost(compat.cancel_barriers)
    compat.bind_gloo(membership.local_address)
    devices = _create_backend(client, config.process_id, members, job.check)
    islands = _islands.make_islands(members, devices)
    has_gpus = engine is not None and members[config.process_id].platform in jaxlib.GPU_PLATFORMS
    channels = None
    if has_gpus:
        channels = _device_channels.plan_channels(config, islands, members, job.connected)
    connector = None if engine is None else _make_connector(job, engine, channels)
    flags = compiler_settings.xla_flags_text(os.environ)
    parts = _session.Parts(
        membership,
        relay,
        job.settings_differences,
        wait_for_devices=compat.device_wait() if has_gpus else None,
        compilation=_compilation.Parts(
            connector,
            channels and channels.later,
            _shared(config, membership) if job.shares_programs else None,
            gpu_settings.over_islands(flags) if has_gpus else {},
        ),
    )
    session = _session.Session(config, config.process_id, islands, engine, parts)
    if engine is not None:
        try:
            mine = [d for d in session.island.devices if d.process_index == session.process]
            _check_gpus(mine, own_gpus(config, session.island.platform))
            _set_ranks(session, engine)
            if channels is not None:
                _open_devices(session, engine, members, job.listener, channels, job.check)
            if connector is not None:
                connector.start(lambda error: engine.fail(type(error).__name__, str(error)))
            _bridge(session, devices)
        except BaseException:
            session.discard()
            raise
    return session


def _connect_client(job: _Job) -> tuple[Any, _ffi.Relay]:
    """Connects JAX's client to its service, through a relay."""
    config, membership = job.config, job.membership
    relay = _ffi.Relay(membership.service_address)
    try:
        client = compat.run_with_checks(
            lambda: compat.connect_client(
                membership.service_address,
                config.num_processes,
                config.process_id,
                membership.credentials,
                relay.url,
            ),
            job.check,
        )
    except BaseException:
        # Without the service the call does not return. It would abort the process if it returned
        # to Python while that ends.
        relay.close()
        raise
    return client, relay


def _set_partitions(config: PlacedConfig, members: Sequence[ProcessInfo], names: list[str]) -> None:
    """Tells JAX the partition (slice) of each process: the user's, else its island's index.

    Not in a job of one island without values of the user: XLA makes a partition of each host.
    """
    if len(names) == 1 and all(info.partition_index is None for info in members):
        return
    partitions = {
        info.process: names.index(info.island)
        if info.partition_index is None
        else info.partition_index
        for info in members
    }
    slices.set_partitions(partitions, config.process_id, members[config.process_id].platform)
    slices.accept_in_make_mesh()


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


def _check_gpus(devices: Sequence[Device], gpus: Sequence[Mapping[str, Any]]) -> None:
    """Refuses different GPUs in a process if its plugin gives them all the name of the first one.

    XLA compiles one executable for all GPUs of a process, and programs could not tell them apart.
    """
    kinds = {device.device_kind for device in devices}
    ordinals = {device.local_hardware_id for device in devices}
    models = dict.fromkeys(gpu["model"] for gpu in gpus if gpu["ordinal"] in ordinals)
    if len(models) <= len(kinds):
        return
    raise UsageError(
        f"the GPUs of this process differ ({', '.join(models)}), and JAX takes them for equal ones"
        f" ({', '.join(kinds)}): XLA would run the executable of the first on all of them. Give"
        " each model processes of its own (`jaxhet launch --devices`, or JAXHET_LOCAL_DEVICE_IDS)"
    )


def _set_ranks(session: _session.Session, engine: _ffi.Engine) -> None:
    engine.set_ranks(
        [
            (device.id, device.process_index, island.index, island.platform)
            for island, device in _islands.by_rank(session.islands).values()
        ]
    )


def _bridge(session: _session.Session, devices: list[Device]) -> None:
    """Registers engine and passes with XLA and JAX. The last step: XLA can't unregister them."""
    platform = session.island.platform
    _ffi.register_handlers(platform)
    attribute, own = compiler.PROGRAM_ATTRIBUTE, session.compilation
    programs.watch_lowering(jaxprs.labels, jaxprs.argument_labels, own.describe, attribute)
    programs.watch_callbacks(own.callback_failed)
    programs.guard_launches(attribute, own.is_bridged, own.check_launch, own.accept_deserialized)
    if platform in jaxlib.GPU_PLATFORMS:
        own.share()
        programs.add_compiler_options(own.compiler_options)
    own.own_launches()
    compat.register_passes(own.decompose, own.bridge, platform)
    puts = _device_put.Puts(session.islands, session.process)
    puts.install()
    if platform == "cpu":  # on GPUs the end of XLA's client at exit was not tried
        session.observe(puts)
    this = weakref.ref(session)
    multihost.synchronize_by(lambda name: (live := this()) is not None and live.meet(name))
    counts = collections.Counter(d.process_index for d in devices)
    if len(set(counts.values())) > 1:
        multihost.allow_unequal_processes()
    compat.guard_compilation_cache(own.cache_salt, own.accept_cached, own.writes_cache)


def _open_devices(
    session: _session.Session,
    engine: _ffi.Engine,
    members: Sequence[ProcessInfo],
    listener: _listener.Listener,
    channels: ChannelPlan,
    check: Callable[[], None],
) -> None:
    """Opens this process's GPUs, and the device channels that exist from the start."""
    config = session.config
    early = [pair for pair in channels.sockets if pair not in channels.later]
    sockets = bootstrap.connect_device_channels(
        listener,
        channels.sockets_of(early, members),
        len(channels.process_of),
        config.connect_timeout_s,
        check,
    )
    # XLA's other arrays will lie where these do.
    ranks = {rank: device for rank, (_, device) in _islands.by_rank(session.islands).items()}
    num_bytes = _ffi.PROOF_BYTES * len(ranks)
    proofs = {rank: compat.memory_on(ranks[rank], num_bytes) for rank in channels.ranks}
    engine.open_devices(
        session.island.platform,
        [
            (
                rank,
                ranks[rank].local_hardware_id,
                proofs[rank].unsafe_buffer_pointer(),
                proofs[rank].nbytes,
            )
            for rank in channels.ranks
        ],
        sockets,
        config.connect_timeout_s,
        sorted(channels.later),
    )
