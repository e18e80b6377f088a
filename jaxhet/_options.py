"""The options: one dataclass, from which arguments, environment, checks and docs derive."""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

PREFIX = "JAXHET_"

_WEEK_S = 7 * 24 * 3600.0
_MOST_BYTES = 16 << 20  # largest chunk, slot and eager message
_OPTION = "option"  # key in the metadata of a field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Facts about one option.

    Attributes:
      name: Name of the argument and of the field.
      type: Type of the value, or of its items.
      default: Value where no argument and no environment variable sets the option.
      help: One sentence for users.
      is_list: Whether the value is a sequence; in the environment a list with commas.
      choices: Valid values, or items; none: any.
      minimum: Smallest valid value.
      maximum: Largest valid value.
      unit: Unit of the value, which the name repeats: "s" or "bytes".
      agreed: Whether every process of the job must have the same value.
      engine: Whether the C++ engine needs it (`Config.engine_values`).
    """

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    is_list: bool
    choices: tuple[str, ...]
    minimum: float | None = None
    maximum: float | None = None
    unit: Literal["", "s", "bytes"] = ""
    agreed: bool = False
    engine: bool = False

    @property
    def env(self) -> str:
        """The environment variable that sets the option."""
        return PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value of a text.

        Raises:
          ValueError: The text has another type.
        """
        if self.is_list:
            return tuple(self.type(part.strip()) for part in text.split(",") if part.strip())
        if self.type is bool:
            return _flag(text)
        if self.choices and text.lower() in _FLAGS and {"0", "1"} <= {*self.choices}:
            return str(int(_flag(text)))
        return self.type(text)


def option(default: Any, help: str, **facts: Any) -> Any:
    """A field of a dataclass of options.

    Args:
      default: Value where nothing sets the option.
      help: One sentence for users.
      **facts: Further attributes of `Option`.
    """
    return dataclasses.field(default=default, metadata={_OPTION: {"help": help, **facts}})


def table(of: type) -> tuple[Option, ...]:
    """The options of a dataclass, with types and choices from its annotations."""
    hints = get_type_hints(of)
    return tuple(
        Option(
            name=field.name,
            default=field.default,
            **_type_facts(hints[field.name]),
            **field.metadata[_OPTION],
        )
        for field in dataclasses.fields(of)
        if _OPTION in field.metadata
    )


def _type_facts(hint: Any) -> dict[str, Any]:
    """The attributes of `Option` that an annotation gives."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not types.NoneType)
    is_list = get_origin(hint) is Sequence
    if is_list:
        (hint,) = get_args(hint)
    if get_origin(hint) is Literal:
        return {"type": str, "choices": get_args(hint), "is_list": is_list}
    return {"type": hint, "choices": (), "is_list": is_list}


_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


Transport = Literal["cuda_ipc", "hip_ipc", "shm", "shm_ring", "verbs", "tcp"]
# Best first, as in xla_plugin/transport/table.cc and xla_plugin/transport/device_channel_table.cc.
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that users give: arguments of `jaxhet.initialize`, or environment variables."""

    coordinator_address: str | None = option(None, "host:port of the job's coordinator")
    num_processes: int | None = option(None, "number of processes of the job", minimum=1)
    process_id: int | None = option(None, "this process: 0 … num_processes - 1", minimum=0)
    island: str | None = option(None, "name of this process's island; default: its platform")
    _: dataclasses.KW_ONLY
    coordinator_bind_address: str | None = option(
        None,
        "host:port that the coordinator listens on, if it differs from the coordinator's address",
    )
    island_process_id: int | None = option(
        None,
        "index of this process in its island, 0 …; determines the process id",
        minimum=0,
    )
    islands: Sequence[str] = option(
        (),
        "all islands, which each process checks: names, or NAME=PROCESSES,…",
    )
    cluster_detection_method: str | None = option(
        None,
        "scheduler whose variables give the place in the job, as in JAX; deactivate: none",
    )
    job_secret: str | None = option(None, "secret that authenticates the job's connections")
    job_secret_file: str | None = option(None, "file that holds the job secret")
    cpu_devices: int | None = option(
        None,
        "virtual CPU devices of this process, where JAX uses CPUs",
        minimum=1,
    )
    local_device_ids: Sequence[int] | None = option(
        None,
        "numbers of the visible GPUs that this process uses; default: all",
    )
    partition_index: int | None = option(
        None,
        "JAX's partition (slice) of this process's devices; default: the index of its island,"
        " if there are several",
        minimum=0,
    )
    cpu_keep_memory: bool = option(
        True,
        "on CPU, freed memory stays with the process: fewer page faults",
    )
    transports: Sequence[Transport] = option(TRANSPORTS, "transports that may be used", agreed=True)
    qualification: str | None = option(
        None,
        "report of `jaxhet doctor --qualify`; the job uses only transports that it proves",
    )
    unproven: Literal["refuse", "allow"] = option(
        "refuse",
        "use of transports that the qualification has not proven; failed ones are never used",
        agreed=True,
    )
    tcp_sockets: int = option(
        2,
        "smallest number of data sockets per peer process; equally many per pair of interfaces",
        minimum=1,
        agreed=True,
    )
    tcp_interfaces: Sequence[str] = option(
        (),
        "network interfaces for data over tcp: names, or networks such as 10.0.1.0/24;"
        " default: the fastest interfaces with private addresses in networks that the peer"
        " shares, those nearest to the process's GPUs first",
    )
    device_channel_sockets: int = option(
        16,
        "data sockets between two GPUs that have no better path than tcp",
        minimum=1,
        agreed=True,
    )
    encryption: Literal["off", "auth", "full"] = option(
        "off",
        "protection of TCP traffic after the handshakes: off: none; auth: against changes;"
        " full: against changes and readers; with auth and full RDMA is not used; a job with"
        " public addresses must set it",
        agreed=True,
        engine=True,
    )
    tcp_address: str | None = option(
        None,
        "address that this process listens on; default: the one that reaches the coordinator",
    )
    tcp_port: int = option(
        0,
        "port that this process listens on; 0: any free one",
        minimum=0,
        maximum=65535,
    )
    tcp_advertise: str | None = option(
        None,
        "host:port that peers connect to; default: the address that this process listens on",
    )
    chunk_bytes: int = option(
        512 * 1024,
        "bytes per chunk of a large message",
        minimum=4096,
        maximum=_MOST_BYTES,
        unit="bytes",
        engine=True,
    )
    zero_copy: bool = option(
        True,
        "zero-copy for messages above eager_bytes: the receiving GPU (same host and vendor)"
        " or the sending NIC reads the operand directly",
    )
    slot_bytes: int = option(
        8 << 20,
        "bytes per slot of a path between two GPUs; over shm and tcp at most 2 MiB",
        minimum=4096,
        maximum=_MOST_BYTES,
        unit="bytes",
        engine=True,
    )
    eager_bytes: int = option(
        16 * 1024,
        "largest message that travels with its header; between GPUs of one host it uses the"
        " program's own stream",
        minimum=0,
        maximum=_MOST_BYTES,
        unit="bytes",
        engine=True,
    )
    verbs_devices: Sequence[str] = option(
        (),
        "RDMA NICs to use, `mlx5_0` or `mlx5_0:1`; default: all",
        engine=True,
    )
    verbs_gid_index: int | None = option(
        None,
        "GID index of RoCE NICs; default: RoCE v2 with an IPv4 address, else a global IPv6 one",
        minimum=0,
        maximum=255,
        engine=True,
    )
    verbs_pkey_index: int = option(
        0,
        "index of the InfiniBand partition in the port's table",
        minimum=0,
        maximum=65535,
        engine=True,
    )
    verbs_qps: int = option(
        2,
        "RDMA queue pairs for data, per peer and NIC",
        minimum=1,
        maximum=16,
        engine=True,
    )
    verbs_depth: int = option(
        8,
        "RDMA chunks in flight, per peer and NIC",
        minimum=1,
        maximum=256,
        engine=True,
    )
    verbs_traffic_class: int = option(
        0,
        "traffic class of RoCE",
        minimum=0,
        maximum=255,
        engine=True,
    )
    verbs_service_level: int = option(
        0,
        "RDMA service level; RoCE: a VLAN's priority",
        minimum=0,
        maximum=15,
        engine=True,
    )
    verbs_timeout: int = option(
        18,
        "RDMA wait for an acknowledgement before a retransmission: 4.096 µs · 2^timeout",
        minimum=1,
        maximum=31,
        engine=True,
    )
    verbs_retries: int = option(
        7,
        "RDMA retransmissions before a queue pair is declared failed (ibv retry_cnt)",
        minimum=0,
        maximum=7,
        engine=True,
    )
    connect_timeout_s: float = option(
        60.0,
        "time for all processes to join and connect",
        minimum=0,
        maximum=_WEEK_S,
        unit="s",
    )
    connect: Literal["auto", "all", "needed"] = option(
        "auto",
        "when processes on CPUs connect: all of them at the start, or two when a program"
        " needs it (needed); auto: all in jobs of up to 16 processes. Processes with GPUs"
        " connect at the start",
        agreed=True,
    )
    shutdown_timeout_s: float = option(
        300.0,
        "longest wait at the end of the job for the other processes",
        minimum=0,
        maximum=_WEEK_S,
        unit="s",
    )
    heartbeat_s: float = option(
        1.0,
        "time between two heartbeats to a peer",
        minimum=0.001,
        maximum=_WEEK_S,
        unit="s",
        engine=True,
    )
    peer_timeout_s: float = option(
        8.0,
        "silence after which a peer has failed",
        minimum=0.001,
        maximum=_WEEK_S,
        unit="s",
        engine=True,
    )
    deadline_s: float = option(
        300.0,
        "longest wait of an exchange for a peer that is ready",
        minimum=0.001,
        maximum=_WEEK_S,
        unit="s",
        engine=True,
    )
    first_deadline_s: float = option(
        1800.0,
        "longest wait of a program's first exchange for a peer that still compiles it",
        minimum=0.001,
        maximum=_WEEK_S,
        unit="s",
        engine=True,
    )
    tuning_timeout_s: float = option(
        600.0,
        "longest wait, for each program, for the executable of another process with equal GPUs",
        minimum=0,
        maximum=_WEEK_S,
        unit="s",
    )
    exit_after_failure_s: float = option(
        30.0,
        "time after which a process that ignores the job's failure is ended, and after a"
        " failure the longest time from a program's exit hooks to its end; 0: never",
        minimum=0,
        maximum=_WEEK_S,
        unit="s",
    )
    algorithm: Literal["auto", "flat", "hierarchical"] = option(
        "auto",
        "how a collective over islands is split",
        agreed=True,
    )
    two_shot_bytes: int = option(
        64 * 1024,
        "size above which a flat all-reduce is two-shot (a reduce-scatter and an all-gather);"
        " of two ranks, one permute and a sum",
        minimum=0,
        unit="bytes",
        agreed=True,
    )
    bucket_bytes: int = option(
        256 * 1024,
        "largest size of small all-reduces that share one exchange on GPUs; 0: none share",
        minimum=0,
        unit="bytes",
        agreed=True,
    )
    pipeline_iterations: int = option(
        8,
        "fewest iterations of a loop whose exchanges overlap with the neighbouring iteration,"
        " on GPUs; such a loop does each exchange once more; 0: no loop",
        minimum=0,
        agreed=True,
    )
    one_world_kernels: bool | None = option(
        None,
        "1: on GPUs, XLA compiles the kernels that one NCCL world would have, so that two"
        " GPUs, one on each island, can get the same bits; fewer exchanges overlap. Default: 1"
        " if all processes have --xla_gpu_deterministic_ops or"
        " --xla_gpu_exclude_nondeterministic_ops in XLA_FLAGS",
        agreed=True,
    )
    metrics_address: str | None = option(
        None,
        "host:port at which process i serves Prometheus metrics, on the port plus i",
    )
    metrics_folder: str | None = option(
        None,
        "folder in which process i writes Prometheus metrics, to jaxhet-i.prom, every 10 s",
    )
    log_level: Literal["info", "warning", "error", "critical"] = option(
        "info",
        "least severe messages of Python's logger `jaxhet`, on stderr by default, and of the"
        " C++ engine; errors of the engine are always written",
        engine=True,
    )
    trace_folder: str | None = option(
        None,
        "folder in which process i writes its last exchanges (at most 4096, and as many for"
        " each GPU), to jaxhet-i.trace.json, when it leaves or the job fails; for `jaxhet"
        " trace`",
    )
    profiler_ranges: bool = option(
        False,
        "1: mark exchanges as ranges for Nsight Systems (NVTX) or rocprofv3 (rocTX)",
        engine=True,
    )
    disable: bool = option(False, "leaves programs unchanged (in a job of one island)")
    dump: str | None = option(None, "folder for HLO and plan before and after the passes")
