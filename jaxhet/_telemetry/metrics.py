"""Prometheus metrics of this process, served at a port.

The package prometheus_client formats them; the numbers are the engine's counters, read at each
scrape. All metrics have the labels `process` and `island`; docs/guides/metrics.md lists
them.
"""

import socket
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from jaxhet._errors import UsageError
from jaxhet._net.addresses import split_address
from jaxhet._session import Observer, Session
from jaxhet._telemetry.metrics_server import MetricsServer

_OWN = ("process", "island")
_PATH = (*_OWN, "transport", "peer_island")
_PEER = (*_OWN, "peer", "peer_island")


class Metrics(Observer):
    """Serves the metrics of a session until it is closed.

    Raises:
      UsageError: prometheus_client is missing, or the address can't be used.
    """

    def __init__(self, address: str, session: Session):
        client = _client()
        self._families = client.core
        self._session = session
        self._own = (str(session.process), session.island.name)
        self._island_of = {
            process: island.name for island in session.islands for process in island.processes
        }
        registry = client.CollectorRegistry()
        registry.register(self)
        self._server: MetricsServer | None = _serve(client, address, session.process, registry)

    def close(self) -> None:
        """Stops serving. The engine is still open."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the listening socket."""
        if self._server is not None:
            self._server.close_in_child()

    def collect(self) -> Iterator[Any]:
        """All metrics with their present values. prometheus_client calls it at each scrape."""
        session = self._session
        failed = self._families.GaugeMetricFamily(
            "jaxhet_failed", "1 after the job has failed", labels=_OWN
        )
        failed.add_metric(self._own, float(session.error() is not None))
        yield failed
        if session.engine is not None:
            yield from self._of_engine(session.engine.stats())
            yield from self._of_peers(session.engine.peer_stats())

    def _of_engine(self, stats: Mapping[str, int]) -> Iterator[Any]:
        for name, meaning, value in (
            ("exchanges_started", "Exchanges started", stats["exchanges_started"]),
            ("exchanges_completed", "Exchanges completed", stats["exchanges_completed"]),
            (
                "exchange_seconds",
                "Time from start to completion, added up over exchanges",
                stats["in_flight_us"] / 1e6,
            ),
        ):
            yield self._counter(f"jaxhet_{name}", meaning, value)

    def _of_peers(self, peers: list[dict[str, Any]]) -> Iterator[Any]:
        make = self._families.CounterMetricFamily
        for direction in ("sent", "received"):
            family = make(
                f"jaxhet_bytes_{direction}",
                f"Bytes of exchanges that were {direction}",
                labels=_PATH,
            )
            by_path: dict[tuple[str, str], int] = {}
            for peer in peers:
                key = peer["transport"], self._island_of[peer["process"]]
                by_path[key] = by_path.get(key, 0) + peer[f"bytes_{direction}"]
            for key, value in by_path.items():
                family.add_metric((*self._own, *key), value)
            yield family
        waited = make(
            "jaxhet_wait_seconds",
            "Time that started transfers waited for the peer to start, added up",
            labels=_PEER,
        )
        failures = make(
            "jaxhet_path_failures", "Paths to a peer that failed and were left", labels=_PEER
        )
        by_peer: dict[int, tuple[int, int]] = {}
        for peer in peers:
            us, count = by_peer.get(peer["process"], (0, 0))
            by_peer[peer["process"]] = us + peer["waited_us"], count + peer["path_failures"]
        for process, (us, count) in by_peer.items():
            if process != self._session.process:
                labels = (*self._own, str(process), self._island_of[process])
                waited.add_metric(labels, us / 1e6)
                failures.add_metric(labels, count)
        yield from (waited, failures)

    def _counter(self, name: str, meaning: str, value: float) -> Any:
        family = self._families.CounterMetricFamily(name, meaning, labels=_OWN)
        family.add_metric(self._own, value)
        return family


def _client() -> ModuleType:
    try:
        import prometheus_client
        import prometheus_client.core
    except ModuleNotFoundError:
        raise UsageError(
            "JAXHET_METRICS_ADDRESS needs the package prometheus_client:"
            " pip install -c constraints.txt -e '.[metrics]' in the checkout"
        ) from None
    return prometheus_client


def _serve(client: ModuleType, address: str, process: int, registry: Any) -> MetricsServer:
    host, port = split_address(address, "metrics_address")
    port += process
    try:
        if port > 65535:
            raise OverflowError
        return MetricsServer(host, port, client.make_wsgi_app(registry))
    except (OSError, OverflowError, socket.gaierror) as error:
        words = getattr(error, "strerror", None) or "there are no ports above 65535"
        reason = words.partition(" (while ")[0]  # `create_server` adds the address
        raise UsageError(
            f"metrics can't be served on {host}:{port} ({reason}); process {process}"
            f" uses the port of JAXHET_METRICS_ADDRESS={address} plus its number:"
            " choose one with as many free ports above it as there are processes"
        ) from None
