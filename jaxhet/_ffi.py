"""The only importer of the extension: the engine, and its FFI handlers."""

import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax

try:
    from jaxhet import _engine
except ImportError as error:
    if importlib.util.find_spec("jaxhet._engine") is not None:
        raise
    raise ImportError(
        f"jaxhet was imported from {pathlib.Path(__file__).parents[1]}, where its extension is not"
        " built: run `pip install -c constraints.txt -e .` there, or, if jaxhet is installed, start"
        " the program in another folder"
    ) from error
from jaxhet import _vendors
from jaxhet._config import Config, PlacedConfig
from jaxhet._errors import BY_NAME, JaxhetError, UsageError
from jaxhet._job.bootstrap import PeerSockets, RankSockets
from jaxhet._job.listener import Link
from jaxhet._job.process_info import ProcessInfo
from jaxhet._net.addresses import split_address
from jaxhet.compiler.exchange import Movement

# The engine's tables; tests/python/test_tables.py compares them with Python's.
EXCHANGE_KINDS: dict[str, int] = dict(_engine.EXCHANGE_KINDS)
TRANSPORTS: tuple[str, ...] = tuple(_engine.TRANSPORTS)
DEVICE_TRANSPORTS: tuple[str, ...] = tuple(_engine.DEVICE_TRANSPORTS)
# Bytes on a device that a proof of channels between two ranks writes.
PROOF_BYTES: int = _engine.PROOF_BYTES

# Functions without a state, described in `_engine.pyi`.
fail_exit = _engine.fail_exit
limit_finalization = _engine.limit_finalization
vendors = _engine.vendors

_sessions = itertools.count(1)


class Engine:
    """The engine of this process: it moves the bytes of exchanges and watches the peers."""

    def __init__(
        self,
        config: PlacedConfig,
        members: Sequence[ProcessInfo],
        refused: Mapping[int, Mapping[str, str]],
    ):
        self.session = next(_sessions)
        self._config, self._members, self._refused = config, members, refused
        self._last_error: tuple[str, str] | None = None
        with _errors_as_ours():
            self._open: _engine.Engine | None = _engine.Engine(
                self.session, config.process_id, len(members), config.engine_values()
            )

    @classmethod
    def start(
        cls,
        config: PlacedConfig,
        members: Sequence[ProcessInfo],
        sockets: Mapping[int, PeerSockets],
        refused: Mapping[int, Mapping[str, str]],
    ) -> Self:
        """Starts an engine on authenticated sockets, which it owns from then on.

        Args:
          config: The options.
          members: All processes.
          sockets: Sockets to each process that is connected from the start.
          refused: Transports to each other process that are not to be used, and why.

        Raises:
          TransportError: no transport works to some peer; the text has the reason of each.
          UsageError: libcrypto is missing, which an option needs.
        """
        engine = cls(config, members, refused)
        try:
            for process, peer in sockets.items():
                engine._add_peer(process, peer)
            engine._engine.start(round(config.connect_timeout_s * 1000))
        except RuntimeError as error:
            engine.close(0)
            raise as_ours(str(error)) from error
        return engine

    def join_peer(self, process: int, sockets: PeerSockets) -> None:
        """Connects one more peer to the running engine; blocks until the peer does the same.

        Raises:
          PeerError: The peer left.
          TransportError: No transport works to it.
        """
        timeout_ms = round(self._config.connect_timeout_s * 1000)
        with _errors_as_ours():
            self._add_peer(process, sockets, timeout_ms=timeout_ms)

    def _add_peer(self, process: int, sockets: PeerSockets, **timeout_ms: int) -> None:
        config, info = self._config, self._members[process]
        refused = self._refused.get(process, {})
        same_host = info.host_id == self._members[config.process_id].host_id
        transports = [t for t in config.transports if t in TRANSPORTS] or ["socket"]
        self._engine.add_peer(
            process=process,
            description=f"{info.island}, pid {info.pid} on {info.host}",
            control_fd=sockets.control.socket.detach(),
            data_fds=[link.socket.detach() for link in sockets.data],
            same_host=same_host,
            transports=transports if sockets.data else [],
            device_transports=[t for t in config.transports if t not in refused],
            refused=refused,
            keys=_hex_keys((sockets.control, *sockets.data)),
            **timeout_ms,
        )

    @property
    def _engine(self) -> _engine.Engine:
        if self._open is None:
            raise UsageError("jaxhet is shut down in this process")
        return self._open

    # Methods without a docstring are as in `_engine.pyi`.

    def set_ranks(self, ranks: Sequence[tuple[int, int, int, str]]) -> None:
        self._engine.set_ranks(ranks)

    def transport_of(self, process: int) -> tuple[str, list[tuple[str, str]]]:
        return self._engine.transport_of(process)

    def wait_failure(self, timeout_ms: int) -> tuple[str, str] | None:
        return self._engine.wait_failure(timeout_ms)

    def stats(self) -> dict[str, int]:
        return self._engine.stats()

    def peer_stats(self) -> list[dict[str, Any]]:
        return self._engine.peer_stats()

    def flight_record(self) -> list[dict[str, Any]]:
        return self._engine.flight_record()

    def abandon_in_child(self) -> None:
        self._engine.abandon_in_child()

    def open_devices(
        self,
        platform: str,
        devices: Sequence[tuple[int, int, int, int]],
        sockets: Sequence[RankSockets],
        timeout_s: float,
        later: Sequence[tuple[int, int]],
    ) -> None:
        """Opens the device channels between this process's GPUs and others.

        After `set_ranks` and before any program runs. Blocks until all processes have called it.

        Args:
          platform: JAX's name of this process's platform.
          devices: Each rank of this process, the ordinal of its device here, and the address and
            size of memory there that the set-up may write: PROOF_BYTES for each rank of the job.
            Peers' devices may then read the allocation that it lies in. 0 bytes: they may not.
          sockets: For ranks that have no better path. The engine owns them from now on.
          timeout_s: The longest wait for the peers.
          later: Own rank and other rank, between which `open_channels` opens channels.

        Raises:
          TransportError: no transport works between two ranks; the text has the reason of each.
          DeviceError: the driver refused a request.
        """
        timeout_ms = round(timeout_s * 1000)
        with _errors_as_ours():
            self._engine.open_devices(
                _vendors.BY_PLATFORM[platform].name,
                list(devices),
                _detached(sockets),
                timeout_ms,
                list(later),
            )

    def open_channels(
        self,
        pairs: Sequence[tuple[int, int]],
        sockets: Sequence[RankSockets],
        timeout_s: float,
    ) -> None:
        """Opens device channels while programs run; blocks until the peer does the same.

        Args:
          pairs: Own rank and other rank, all of one peer, named by `later` of `open_devices`.
          sockets: Sockets of these pairs, as in `open_devices`.
          timeout_s: The longest wait for the peer.

        Raises:
          PeerError: The peer left.
          TransportError: No transport works between two ranks.
        """
        timeout_ms = round(timeout_s * 1000)
        with _errors_as_ours():
            self._engine.open_channels(list(pairs), _detached(sockets), timeout_ms)

    def register_plan(
        self, fingerprint: int, text: str, movements: Sequence[Movement], program: str = ""
    ) -> None:
        """Registers the plan of a program, before the program starts.

        Args:
          fingerprint: Identity of the plan.
          text: One line per exchange. What is compared, a tab, a description.
          movements: One for each exchange.
          program: The program's name with a digest, then one line per equation; "" if unknown.
        """
        exchanges = [(m.kind.value, *dataclasses.astuple(m)[1:]) for m in movements]
        self._engine.register_plan(fingerprint, text, program, exchanges)

    def error(self) -> JaxhetError | None:
        """The first failure, or None; known after `close` too."""
        found = self._open.error() if self._open else self._last_error
        return as_ours(found[1]) if found else None

    def fail(self, code: str, text: str) -> None:
        """Fails the engine and the engines of all peers, for a reason found elsewhere."""
        # UTF-8 has no form for the bytes of a file's name that Python could not decode.
        self._engine.fail(code, text.encode(errors="backslashreplace").decode())

    def close(self, timeout_ms: int) -> None:
        """Says goodbye, waits for the peers to do so, and frees everything. Idempotent."""
        if self._open is not None:
            self._open.close(timeout_ms)
            self._last_error = self._open.error()
            self._open = None


def _detached(
    sockets: Sequence[RankSockets],
) -> list[tuple[int, int, int, list[int], list[tuple[str, str]]]]:
    """Descriptors of sockets, detached from Python: the engine owns them from now on."""
    return [
        (
            s.rank,
            s.peer,
            s.num_lanes,
            [link.socket.detach() for link in s.links],
            _hex_keys(s.links),
        )
        for s in sockets
    ]


def register_handlers(platform: str) -> None:
    """Registers the engine's handlers with XLA, for JAX's platform of this name."""
    is_cpu = platform == "cpu"
    for target, handler in _engine.handlers()["cpu" if is_cpu else "gpu"].items():
        name = platform if is_cpu else platform.upper()  # the plugins' own spelling
        jax.ffi.register_ffi_target(target, handler, platform=name)


def nics(config: Config) -> list[dict[str, Any]]:
    """Every port of every RDMA NIC, as the verbs transport of a job sees it; as in `_engine.pyi`.

    Raises:
      TransportError: there is no NIC, or no libibverbs.
      UsageError: an option is out of its range.
    """
    with _errors_as_ours():
        return _engine.nics(config.engine_values())


def libcrypto() -> str:
    """Version of the library that `JAXHET_ENCRYPTION` needs.

    Raises:
      UsageError: this machine does not have it.
    """
    with _errors_as_ours():
        return _engine.libcrypto()


class Relay:
    """An HTTP proxy in this process, through which JAX's client reaches the coordination service.

    JAX's client aborts the process when its connection ends. The relay keeps it open when the
    service is gone: shut the client down then.

    Args:
      address: host:port of the service.
    """

    def __init__(self, address: str):
        host, port = split_address(address, "the coordinator's service")
        with _errors_as_ours():
            self._relay = _engine.Relay(host, str(port))

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self._relay.port}"

    def close(self) -> None:
        """Ends the connection. Without it, it lives as long as the process."""
        self._relay.close()


@contextlib.contextmanager
def _errors_as_ours() -> Iterator[None]:
    """Raises the errors of the extension as jaxhet's."""
    try:
        yield
    except RuntimeError as error:
        raise as_ours(str(error)) from error


def as_ours(text: str) -> JaxhetError:
    """The error that a text of the engine, `jaxhet.<Class>: <what>`, stands for."""
    name, _, what = text.removeprefix("jaxhet.").partition(": ")
    return BY_NAME.get(name, JaxhetError)(what or text)


def _hex_keys(links: Sequence[Link]) -> list[tuple[str, str]]:
    """The keys to send and to receive with, as the extension takes them."""
    return [(link.keys.send.hex(), link.keys.receive.hex()) for link in links]
