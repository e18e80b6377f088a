"""The options: one dataclass, from which arguments, environment, checks and docs derive."""

import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

PREFIX = "JAXHET_"

_WEEK_S = 7 * 24 * 3600.0
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
      agreed: Whether every process of the job must have the same value.
      engine: Whether the C++ engine needs it (`Config.engine_values`).
      aliases: Other names of choices, and the choices that they stand for.
      nccl: Variable of NCCL that sets the option where nothing else does; "": none.
      is_keyed: Whether an item may be NAME=CHOICE.
      is_knob: Whether only tests and measurements set it; its variable has a second underscore.
    """

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    is_list: bool
    choices: tuple[str, ...]
    minimum: float | None = None
    maximum: float | None = None
    agreed: bool = False
    engine: bool = False
    nccl: str = ""
    aliases: Mapping[str, str] = types.MappingProxyType({})
    is_keyed: bool = False
    is_knob: bool = False

    @property
    def env(self) -> str:
        """The environment variable that sets the option."""
        return PREFIX + "_" * self.is_knob + self.name.upper()

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
        return int(text, 16) if self.type is int and text.startswith("0x") else self.type(text)


def option(default: Any, help: str, **facts: Any) -> Any:
    """A field of a dataclass of options.

    Args:
      default: Value where nothing sets the option.
      help: One sentence for users.
      **facts: Further attributes of `Option`.
    """
    return dataclasses.field(default=default, metadata={_OPTION: {"help": help, **facts}})


def knob(default: Any, help: str, **facts: Any) -> Any:
    """An `option` that only tests and measurements set."""
    return option(default, help, is_knob=True, **facts)


def table(of: type) -> tuple[Option, ...]:
    """The options of a dataclass, with types and choices from its annotations."""
    hints = get_type_hints(of)
    return tuple(
        Option(
            name=field.name,
            default=field.default,
            **{**_type_facts(hints[field.name]), **field.metadata[_OPTION]},
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


@dataclasses.dataclass(frozen=True)
class NameList:
    """Names as NCCL_SOCKET_IFNAME and NCCL_IB_HCA list them.

    Attributes:
      wanted: The list as it was given.
      parts: Beginnings of names.
      is_exact: Whether the parts are whole names; a list that begins with `=`.
      excludes: Whether the parts are excluded, and all other names selected; a list that begins
        with `^`.
    """

    wanted: tuple[str, ...]
    parts: tuple[str, ...]
    is_exact: bool
    excludes: bool

    @classmethod
    def parse(cls, wanted: Sequence[str]) -> Self:
        """The list of an option."""
        text = ",".join(wanted)
        rest = text.removeprefix("^")
        parts = tuple(filter(None, rest.removeprefix("=").split(",")))
        return cls(tuple(wanted), parts, rest.startswith("="), text.startswith("^"))

    def fits(self, name: str, part: str) -> bool:
        """Whether the list selects a name."""
        return name == part if self.is_exact else name.startswith(part)

    def nics(self, folder: pathlib.Path = pathlib.Path("/sys/class/infiniband")) -> tuple[str, ...]:
        """The NICs in `folder` that the list selects; each may have a port, as in mlx5_0:1.

        Returns the list itself if it selects none, so that an error names the missing NICs.
        """
        found: dict[str, None] = {}
        for nic in sorted(path.name for path in folder.glob("*")):
            ports = [
                port
                for name, _, port in (part.partition(":") for part in self.parts)
                if self.fits(nic, name)
            ]
            if self.excludes and not ports:
                found[nic] = None
            elif not self.excludes:
                found |= {f"{nic}:{port}" if port else nic: None for port in ports}
        return tuple(found) or self.wanted


_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


Transport = Literal["cuda_ipc", "hip_ipc", "host", "process_vm", "verbs", "socket"]
# Best first, as in xla_plugin/transport/table.cc and transport/device_channel/device_channel.cc.
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Codec = Literal["bf16", "mxfp8", "mxint8", "mxint4"]
# Same names as in jaxhet/compiler/codecs.py.
CODECS: tuple[Codec, ...] = get_args(Codec)


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
    local_device_ids: Sequence[int] | None = option(
        None,
        "numbers of the visible GPUs that this process uses; default: all",
    )
    transports: Sequence[Transport] = option(
        TRANSPORTS,
        "transports that may be used; tcp is another name of socket",
        agreed=True,
        aliases={"tcp": "socket"},
    )
    qualification: str | None = option(
        None,
        "report of `jaxhet doctor --qualify`; the job uses only transports that it proves",
    )
    socket_interfaces: Sequence[str] = option(
        (),
        "network interfaces for data over `socket`: beginnings of names, or networks such as"
        " 10.0.1.0/24; `=eth1`: whole names; `^docker,lo`: all but these; default: the fastest"
        " interfaces with private addresses in networks that the peer shares",
        nccl="NCCL_SOCKET_IFNAME",
    )
    encryption: Literal["off", "auth", "full"] = option(
        "off",
        "protection of TCP traffic after the handshakes: off: none; auth: against changes;"
        " full: against changes and readers; with auth and full RDMA is not used; a job with"
        " public addresses must set it",
        agreed=True,
        engine=True,
    )
    socket_address: str | None = option(
        None,
        "address that this process listens on; default: the one that reaches the coordinator",
    )
    socket_port: int = option(
        0,
        "port that this process listens on; 0: any free one",
        minimum=0,
        maximum=65535,
    )
    socket_advertise: str | None = option(
        None,
        "host:port that peers connect to; default: the address that this process listens on",
    )
    verbs_devices: Sequence[str] = option(
        (),
        "RDMA NICs to use: beginnings of names, each with a port (`mlx5_0:1`) or without;"
        " `=mlx5_1`: whole names; `^mlx5_1`: all but these; default: all",
        engine=True,
        nccl="NCCL_IB_HCA",
    )
    verbs_gid_index: int | None = option(
        None,
        "GID index of RoCE NICs; default: RoCE v2 with an IPv4 address, else a global IPv6 one",
        minimum=0,
        maximum=255,
        engine=True,
        nccl="NCCL_IB_GID_INDEX",
    )
    verbs_pkey_index: int = option(
        0,
        "index of the InfiniBand partition in the port's table",
        minimum=0,
        maximum=65535,
        engine=True,
        nccl="NCCL_IB_PKEY",
    )
    verbs_qps: int = option(
        2,
        "RDMA queue pairs for data, per peer and NIC",
        minimum=1,
        maximum=16,
        agreed=True,
        engine=True,
        nccl="NCCL_IB_QPS_PER_CONNECTION",
    )
    verbs_traffic_class: int = option(
        0,
        "traffic class of RoCE",
        minimum=0,
        maximum=255,
        engine=True,
        nccl="NCCL_IB_TC",
    )
    verbs_service_level: int = option(
        0,
        "RDMA service level; RoCE: a VLAN's priority",
        minimum=0,
        maximum=15,
        engine=True,
        nccl="NCCL_IB_SL",
    )
    verbs_timeout: int = option(
        18,
        "RDMA wait for an acknowledgement before a retransmission: 4.096 µs · 2^timeout",
        minimum=1,
        maximum=31,
        engine=True,
        nccl="NCCL_IB_TIMEOUT",
    )
    verbs_retries: int = option(
        7,
        "RDMA retransmissions before a queue pair is declared failed (ibv retry_cnt)",
        minimum=0,
        maximum=7,
        engine=True,
        nccl="NCCL_IB_RETRY_CNT",
    )
    wire: Sequence[str] = option(
        (),
        "codec of floats between islands, with a loss: for all exchanges that can have one"
        " (`mxint8`), or by mesh axis (`data=mxint8,fsdp=bf16`); default: none",
        agreed=True,
        choices=CODECS,
        is_keyed=True,
    )
    connect_timeout_s: float = option(
        60.0,
        "time for all processes to join and connect",
        minimum=0,
        maximum=_WEEK_S,
    )
    peer_timeout_s: float = option(
        8.0,
        "silence after which a peer has failed; heartbeats are sent eight times as often",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    )
    deadline_s: float = option(
        300.0,
        "longest wait of an exchange for a peer that is ready; six times as long for a program's"
        " first exchange, whose peer may still compile, and twice as long for the executable of"
        " another process with equal GPUs",
        minimum=0.001,
        maximum=_WEEK_S,
        engine=True,
    )
    exit_timeout_s: float = option(
        300.0,
        "longest wait at the end of the job for the other processes; after a failure of the job, a"
        " process that ignores it is ended after a tenth of this time, and so is one whose"
        " interpreter does not end after the program's exit hooks",
        minimum=1,
        maximum=_WEEK_S,
    )
    metrics_address: str | None = option(
        None,
        "host:port at which process i serves Prometheus metrics, on the port plus i",
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
    dump: str | None = option(None, "folder for HLO and plan before and after the passes")
