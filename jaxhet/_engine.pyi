"""The extension (`xla_plugin/python/module.cc`), as `_ffi.py` and pyright see it.

Errors are RuntimeErrors with the text "jaxhet.<Class>: <what>".
"""

from collections.abc import Mapping, Sequence
from typing import Any

EXCHANGE_KINDS: dict[str, int]  # name -> number in plans
TRANSPORTS: list[str]  # between processes, best first
DEVICE_TRANSPORTS: list[str]  # between devices, best first
PROOF_BYTES: int

class Engine:
    """The engine of one process of a job."""

    def __init__(
        self, session: int, process: int, num_processes: int, options: Mapping[str, int | str]
    ) -> None: ...
    def add_peer(
        self,
        process: int,
        description: str,
        control_fd: int,
        data_fds: Sequence[int],
        same_host: bool,
        transports: Sequence[str],
        device_transports: Sequence[str],
        refused: Mapping[str, str],
        keys: Sequence[tuple[str, str]],
        timeout_ms: int | None = None,
    ) -> None:
        """Takes over the sockets, even if it raises.

        timeout_ms: longest wait for the peer's agreement on a transport; None before `start`.
        refused: transports that are not to be used, and why.
        keys: keys to send and to receive, 64 hexadecimal digits each, of `control_fd` and of each
        of `data_fds`.
        """

    def start(self, timeout_ms: int) -> None:
        """Agrees with all peers on transports; then the progress thread runs."""

    def set_ranks(self, ranks: Sequence[tuple[int, int, int, str]]) -> None:
        """Per rank: (device id, process, island, platform)."""

    def open_devices(
        self,
        vendor: str,
        devices: Sequence[tuple[int, int, int, int]],
        sockets: Sequence[tuple[int, int, int, Sequence[int], Sequence[tuple[str, str]]]],
        timeout_ms: int,
        later: Sequence[tuple[int, int]],
    ) -> None:
        """Agrees with other processes on the device channels between GPUs.

        After `set_ranks`, where ranks are GPUs. devices: (rank, ordinal, address, bytes) of this
        process's own; at the address are PROOF_BYTES for each rank of the job, in the allocation
        that operands will be in. 0 bytes: peers' devices must not read it in place.
        sockets: (own rank, other rank, number of lanes, file descriptors, which it owns, and their
        keys) where sockets may be needed. later: (own rank, other rank) without channels for now,
        but with memory for them.
        """

    def open_channels(
        self,
        pairs: Sequence[tuple[int, int]],
        sockets: Sequence[tuple[int, int, int, Sequence[int], Sequence[tuple[str, str]]]],
        timeout_ms: int,
    ) -> None:
        """Agrees with one peer on channels of pairs in `later`; at any time, on both ends."""

    def register_plan(
        self,
        fingerprint: int,
        text: str,
        program: str,
        exchanges: Sequence[tuple[int, Sequence[int], int, int, bool, int, int, bool, int]],
    ) -> None:
        """Makes a plan known, before any of its exchanges starts.

        Args:
          fingerprint: Identity of the plan.
          text: One line per exchange. What is compared, a tab, a description.
          program: First line: name of the program with a digest. Further lines: one per equation.
            What is compared, a tab, a description (optional). "" if unknown. Errors about plans
            that differ show it; the engine ignores a listing of more than 8 MiB.
          exchanges: The fields of `jaxhet.compiler.exchange.Movement`, for each exchange.
        """

    def wait_failure(self, timeout_ms: int) -> tuple[str, str] | None:
        """(error class, text) of the first cause; None at the timeout or after `close`."""

    def error(self) -> tuple[str, str] | None:
        """(error class, text) of the first cause, at once; also after `close`."""

    def fail(self, code: str, text: str) -> None:
        """Fails the engine and tells the peers; `code` is the name of an error class."""

    def stats(self) -> dict[str, int]:
        """Exchanges started and completed, their time, and bytes by transport and direction."""

    def peer_stats(self) -> list[dict[str, Any]]:
        """Statistics per process, this one included, and per transport to it.

        process, transport, bytes_sent, bytes_received, waited_us (of own transfers for its starts,
        added up; 0 between GPUs), path_failures.
        """

    def flight_record(self) -> list[dict[str, Any]]:
        """The last exchanges, oldest first; those between GPUs as a watch saw them.

        rank, kind (name of EXCHANGE_KINDS), plan, index, run, sequence, bytes of the operands,
        group (ranks), state (started, completed, failed), started_us and ended_us (monotonic
        clock; ended_us is 0 for started ones), exchange (its description in the plan).
        """

    def transport_of(self, process: int) -> tuple[str, list[tuple[str, str]]]:
        """(name, [(refused transport, reason)])."""

    def close(self, timeout_ms: int) -> None:
        """Says goodbye, waits for the peers to do so, and frees everything. Idempotent."""

    def abandon_in_child(self) -> None:
        """In a forked child: closes the child's copies of the sockets."""

def handlers() -> dict[str, dict[str, Any]]:
    """FFI target name -> capsule, for "cpu" and for "gpu"."""

def vendors() -> list[tuple[str, list[dict[str, Any]], str]]:
    """Each vendor of GPUs: name, devices, and why they can't be used, or ""."""

def libcrypto() -> str:
    """The version of the library that encrypts; raises if there is none."""

def nics(options: Mapping[str, int | str]) -> list[dict[str, Any]]:
    """Every port of every RDMA NIC, as the verbs transport with an Engine's options sees it.

    device, port (0: the NIC can't be opened), mtu in bytes or None, gid_index or None, reason
    (why this GID, or how InfiniBand is addressed), problem (why it is not used).
    """

class Relay:
    """A proxy between JAX's client and its service; see relay.h."""

    def __init__(self, host: str, port: str) -> None: ...
    @property
    def port(self) -> int: ...
    def close(self) -> None: ...

def fail_exit(code: int) -> None:
    """Makes the exit code of this process `code` where it would be 0; forked children keep 0."""

def limit_finalization(limit_s: float, text: str, code: int) -> None:
    """Ends this process if the interpreter takes longer than `limit_s` after its exit hooks.

    In that case `text` is a line on stderr, and `code` the exit code.
    """
