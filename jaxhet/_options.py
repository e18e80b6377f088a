"""The table of options, from which arguments, environment, checks and docs derive."""

import dataclasses
from collections.abc import Callable
from typing import Any

PREFIX = "JAXHET_"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its argument name, type, default, valid choices and a sentence for people.

    The last part of a name is the value's unit: `_s` seconds, `_bytes` bytes.
    """

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    agreed: bool = False  # every process of the job must have the same value
    engine: bool = False  # the C++ engine needs it (`engine_values`)

    @property
    def env(self) -> str:
        """The environment variable that sets the option."""
        return PREFIX + self.name.upper()


def flag(text: str) -> bool:
    values = {
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
        "": False,
    }
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _auto(text: str) -> str:
    """0 or 1 for the texts of a flag; others are left to the check of the choices."""
    try:
        return str(int(flag(text)))
    except ValueError:
        return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names(text)))


# Best first, as in xla_plugin/transport/table.cc and xla_plugin/transport/device_channel_table.cc.
TRANSPORTS = ("cuda_ipc", "hip_ipc", "shm", "shm_ring", "verbs", "tcp")

_WEEK_S = 7 * 24 * 3600.0
_MOST_BYTES = 16 << 20  # largest chunk, slot and eager message

OPTIONS: tuple[Option, ...] = (
    Option("coordinator_address", str, None, "host:port of the job's coordinator"),
    Option(
        "coordinator_bind_address",
        str,
        None,
        "host:port that the coordinator listens on, if it differs from the coordinator's address",
    ),
    Option("num_processes", int, None, "number of processes of the job", minimum=1),
    Option("process_id", int, None, "this process: 0 … num_processes - 1", minimum=0),
    Option("island", str, None, "name of this process's island; default: its platform"),
    Option(
        "island_process_id",
        int,
        None,
        "index of this process in its island, 0 …; determines the process id",
        minimum=0,
    ),
    Option(
        "islands",
        _names,
        (),
        "all islands, which each process checks: names, or NAME=PROCESSES,…",
    ),
    Option(
        "cluster_detection_method",
        str,
        None,
        "scheduler whose variables give the place in the job, as in JAX; deactivate: none",
    ),
    Option("job_secret", str, None, "secret that authenticates the job's connections"),
    Option("job_secret_file", str, None, "file that holds the job secret"),
    Option(
        "auto",
        _auto,
        "0",
        "1: jax.distributed.initialize of an unmodified program joins the job, and a program that"
        " uses a backend of JAX before it has joined fails; join: the first use of a backend, or of"
        " jax.distributed.is_initialized, joins the job; `jaxhet run` and `jaxhet launch` set it",
        ("0", "1", "join"),
    ),
    Option(
        "program_pid",
        int,
        None,
        "process that may join the job; Python programs that this process starts may use JAX for"
        " themselves. Set by jaxhet when the process imports JAX",
        minimum=1,
    ),
    Option(
        "parent_job",
        str,
        None,
        "address of the coordinator of the job that the parent of this process has joined, so that"
        " this process can't. Set by jaxhet",
    ),
    Option(
        "launched",
        flag,
        False,
        "somebody else runs the coordinator (`jaxhet launch`, `jaxhet coordinator`)",
    ),
    Option(
        "cpu_devices",
        int,
        None,
        "virtual CPU devices of this process, where JAX uses CPUs",
        minimum=1,
    ),
    Option(
        "local_device_ids",
        _numbers,
        None,
        "numbers of the visible GPUs that this process uses; default: all",
    ),
    Option(
        "partition_index",
        int,
        None,
        "JAX's partition (slice) of this process's devices; default: the index of its island, if"
        " there are several",
        minimum=0,
    ),
    Option(
        "cpu_keep_memory",
        flag,
        True,
        "on CPU, freed memory stays with the process: fewer page faults",
    ),
    Option(
        "transports", _names, TRANSPORTS, "transports that may be used", TRANSPORTS, agreed=True
    ),
    Option(
        "qualification",
        str,
        None,
        "report of `jaxhet doctor --qualify`; the job uses only transports that it proves",
    ),
    Option(
        "unproven",
        str,
        "refuse",
        "use of transports that the qualification has not proven; failed ones are never used",
        ("refuse", "allow"),
        agreed=True,
    ),
    Option(
        "tcp_sockets",
        int,
        2,
        "smallest number of data sockets per peer process; equally many per pair of interfaces",
        minimum=1,
        agreed=True,
    ),
    Option(
        "tcp_interfaces",
        _names,
        (),
        "network interfaces for data over tcp: names, or networks such as 10.0.1.0/24; default: the"
        " fastest interfaces with private addresses in networks that the peer shares, those nearest"
        " to the process's GPUs first",
    ),
    Option(
        "device_channel_sockets",
        int,
        16,
        "data sockets between two GPUs that have no better path than tcp",
        minimum=1,
        agreed=True,
    ),
    Option(
        "encryption",
        str,
        "off",
        "protection of TCP traffic after the handshakes: off: none; auth: against changes;"
        " full: against changes and readers; with auth and full RDMA is not used; a job with public"
        " addresses must set it",
        ("off", "auth", "full"),
        agreed=True,
        engine=True,
    ),
    Option(
        "tcp_address",
        str,
        None,
        "address that this process listens on; default: the one that reaches the coordinator",
    ),
    Option(
        "tcp_port",
        int,
        0,
        "port that this process listens on; 0: any free one",
        minimum=0,
        maximum=65_535,
    ),
    Option(
        "tcp_advertise",
        str,
        None,
        "host:port that peers connect to; default: the address that this process listens on",
    ),
    Option(
        "chunk_bytes",
        int,
        512 * 1024,
        "bytes per chunk of a large message",
        minimum=4096,
        maximum=_MOST_BYTES,
        engine=True,
    ),
    Option(
        "zero_copy",
        flag,
        True,
        "zero-copy for messages above eager_bytes: the receiving GPU (same host and vendor) or the"
        " sending NIC reads the operand directly",
    ),
    Option(
        "slot_bytes",
        int,
        8 << 20,
        "bytes per slot of a path between two GPUs; over shm and tcp at most 2 MiB",
        minimum=4096,
        maximum=_MOST_BYTES,
        engine=True,
    ),
    Option(
        "eager_bytes",
        int,
        16 * 1024,
        "largest message that travels with its header; between GPUs of one host it uses the"
        " program's own stream",
        minimum=0,
        maximum=_MOST_BYTES,
        engine=True,
    ),
    Option(
        "verbs_devices",
        _names,
        (),
        "RDMA NICs to use, `mlx5_0` or `mlx5_0:1`; default: all",
        engine=True,
    ),
    Option(
        "verbs_gid_index",
        int,
        None,
        "GID index of RoCE NICs; default: RoCE v2 with an IPv4 address, else a global IPv6 one",
        minimum=0,
        maximum=255,
        engine=True,
    ),
    Option(
        "verbs_pkey_index",
        int,
        0,
        "index of the InfiniBand partition in the port's table",
        minimum=0,
        maximum=65_535,
        engine=True,
    ),
    Option(
        "verbs_qps",
        int,
        2,
        "RDMA queue pairs for data, per peer and NIC",
        minimum=1,
        maximum=16,
        engine=True,
    ),
    Option(
        "verbs_depth",
        int,
        8,
        "RDMA chunks in flight, per peer and NIC",
        minimum=1,
        maximum=256,
        engine=True,
    ),
    Option(
        "verbs_traffic_class", int, 0, "traffic class of RoCE", minimum=0, maximum=255, engine=True
    ),
    Option(
        "verbs_service_level",
        int,
        0,
        "RDMA service level; RoCE: a VLAN's priority",
        minimum=0,
        maximum=15,
        engine=True,
    ),
    Option(
        "verbs_timeout",
        int,
        18,
        "RDMA wait for an acknowledgement before a retransmission: 4.096 µs · 2^timeout",
        minimum=1,
        maximum=31,
        engine=True,
    ),
    Option(
        "verbs_retries",
        int,
        7,
        "RDMA retransmissions before a queue pair is declared failed (ibv retry_cnt)",
        minimum=0,
        maximum=7,
        engine=True,
    ),
    Option(
        "connect_timeout_s",
        float,
        60.0,
        "time for all processes to join and connect",
        minimum=0,
        maximum=_WEEK_S,
    ),
    Option(
        "connect",
        str,
        "auto",
        "when processes on CPUs connect: all of them at the start, or two when a program needs it"
        " (needed); auto: all in jobs of up to 16 processes. Processes with GPUs connect at the"
        " start",
        ("auto", "all", "needed"),
        agreed=True,
    ),
    Option(
        "shutdown_timeout_s",
        float,
        300.0,
        "longest wait at the end of the job for the other processes",
        minimum=0,
        maximum=_WEEK_S,
    ),
    Option(
        "heartbeat_s",
        float,
        1.0,
        "time between two heartbeats to a peer",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    ),
    Option(
        "peer_timeout_s",
        float,
        8.0,
        "silence after which a peer has failed",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    ),
    Option(
        "deadline_s",
        float,
        300.0,
        "longest wait of an exchange for a peer that is ready",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    ),
    Option(
        "first_deadline_s",
        float,
        1800.0,
        "longest wait of a program's first exchange for a peer that still compiles it",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    ),
    Option(
        "tuning_timeout_s",
        float,
        600.0,
        "longest wait, for each program, for the executable of another process with equal GPUs",
        minimum=0,
        maximum=_WEEK_S,
    ),
    Option(
        "exit_after_failure_s",
        float,
        30.0,
        "time after which a process that ignores the job's failure is ended, and after a failure"
        " the longest time from a program's exit hooks to its end; 0: never",
        minimum=0,
        maximum=_WEEK_S,
    ),
    Option(
        "algorithm",
        str,
        "auto",
        "how a collective over islands is split",
        ("auto", "flat", "hierarchical"),
        agreed=True,
    ),
    Option(
        "two_shot_bytes",
        int,
        64 * 1024,
        "size above which a flat all-reduce is two-shot (a reduce-scatter and an all-gather); of"
        " two ranks, one permute and a sum",
        minimum=0,
        agreed=True,
    ),
    Option(
        "bucket_bytes",
        int,
        256 * 1024,
        "largest size of small all-reduces that share one exchange on GPUs; 0: none share",
        minimum=0,
        agreed=True,
    ),
    Option(
        "pipeline_iterations",
        int,
        8,
        "fewest iterations of a loop whose exchanges overlap with the neighbouring iteration, on"
        " GPUs; such a loop does each exchange once more; 0: no loop",
        minimum=0,
        agreed=True,
    ),
    Option(
        "one_world_kernels",
        flag,
        None,
        "1: on GPUs, XLA compiles the kernels that one NCCL world would have, so that two GPUs, one"
        " on each island, can get the same bits; fewer exchanges overlap. Default: 1 if all"
        " processes have --xla_gpu_deterministic_ops or --xla_gpu_exclude_nondeterministic_ops in"
        " XLA_FLAGS",
        agreed=True,
    ),
    Option(
        "metrics_address",
        str,
        None,
        "host:port at which process i serves Prometheus metrics, on the port plus i",
    ),
    Option(
        "metrics_folder",
        str,
        None,
        "folder in which process i writes Prometheus metrics, to jaxhet-i.prom, every 10 s",
    ),
    Option(
        "log_level",
        str,
        "info",
        "least severe messages of Python's logger `jaxhet`, on stderr by default, and of the C++"
        " engine; errors of the engine are always written",
        ("info", "warning", "error", "critical"),
        engine=True,
    ),
    Option(
        "trace_folder",
        str,
        None,
        "folder in which process i writes its last exchanges (at most 4096, and as many for each"
        " GPU), to jaxhet-i.trace.json, when it leaves or the job fails; for `jaxhet trace`",
    ),
    Option(
        "profiler_ranges",
        flag,
        False,
        "1: mark exchanges as ranges for Nsight Systems (NVTX) or rocprofv3 (rocTX)",
        engine=True,
    ),
    Option("disable", flag, False, "leaves programs unchanged (in a job of one island)"),
    Option("dump", str, None, "folder for HLO and plan before and after the passes"),
)
