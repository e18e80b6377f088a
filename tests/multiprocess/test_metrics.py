"""Prometheus metrics of a job, read by the parser of Prometheus's own Python client."""

import socket
import types
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from two_islands import SET_UP

from jaxhet._errors import UsageError
from jaxhet._telemetry import metrics
from jaxhet.testing import free_port
from tests.support import scripts

_SCRIPT = """
import urllib.request
x = put(np.ones((2, 25_000), np.float32))
gather = over_islands(lambda a: jax.lax.all_gather(a, "x"))
gather(x).block_until_ready()
if jax.process_index() == 1:
    time.sleep(0.5)  # the other one waits
gather(x).block_until_ready()
jaxhet.check_replicas({"a": gather(x), "b": gather(x)})
port = PORT + jax.process_index()
print("SCRAPED")
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
jaxhet.shutdown()
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")
except OSError as error:
    print("CLOSED", error)
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def _check(samples: Samples, process: int) -> None:
    own = {"process": str(process), "island": f"island{process}"}
    other = f"island{1 - process}"
    assert _value(samples, "jaxhet_failed", **own) == 0
    started = _value(samples, "jaxhet_exchanges_started_total", **own)
    assert started == _value(samples, "jaxhet_exchanges_completed_total", **own) >= 5
    assert _value(samples, "jaxhet_exchange_seconds_total", **own) > 0
    path = {**own, "transport": "socket", "peer_island": other}
    assert 400_000 <= _value(samples, "jaxhet_bytes_sent_total", **path) < 410_000
    assert 400_000 <= _value(samples, "jaxhet_bytes_received_total", **path) < 410_000
    peer = {**own, "peer": str(1 - process), "peer_island": other}
    assert _value(samples, "jaxhet_path_failures_total", **peer) == 0
    waited = _value(samples, "jaxhet_wait_seconds_total", **peer)
    assert waited >= 0.4 if process == 0 else waited >= 0


def test_metrics_are_served_and_parsed() -> None:
    port = free_port()
    envs = scripts.job(JAXHET_METRICS_ADDRESS=f"127.0.0.1:{port}", JAXHET_TRANSPORTS="socket")
    ended = scripts.run(SET_UP + _SCRIPT.replace("PORT", str(port)), *envs, timeout_s=120)
    for process, one in enumerate(ended):
        assert one.code == 0, one.text
        before, scraped, after = one.text.partition("SCRAPED")
        served, closed, _ = after.partition("CLOSED")
        assert scraped, before
        assert closed
        _check(_samples(served), process)


def _metrics_of(address: str) -> metrics.Metrics:
    island = types.SimpleNamespace(name="a", processes=(3,))
    session: Any = types.SimpleNamespace(
        process=3, island=island, islands=(island,), engine=None, error=lambda: None
    )
    return metrics.Metrics(address, session)


def test_metrics_that_can_not_be() -> None:
    with pytest.raises(UsageError, match="metrics_address 'here' is not host:port"):
        _metrics_of("here")
    with pytest.raises(UsageError, match=r"no ports above 65535.*process 3 uses the port"):
        _metrics_of("127.0.0.1:65533")


_LEAVE = """
import threading, time
import jax, jax.numpy as jnp, jaxhet

try:
    jaxhet.initialize()
    mesh = jaxhet.make_mesh({"x": -1})
    x = jax.device_put(jnp.arange(2), jax.NamedSharding(mesh, jax.P("x")))
    while True:
        jaxhet.block_until_ready(jaxhet.jit(jnp.sum)(x))
        time.sleep(0.1)
except (jaxhet.JaxhetError, jax.errors.JaxRuntimeError) as error:
    print("ERROR", type(error).__name__, error)
    jaxhet.shutdown()
    end = time.monotonic() + 10
    while any(t.name.startswith("jaxhet") for t in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.05)
    print("LEFT")
"""


def test_process_whose_metrics_can_not_be_served_leaves_the_job() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        envs = scripts.job(JAXHET_METRICS_ADDRESS=f"127.0.0.1:{port - 1}")
        first, second = scripts.run(_LEAVE, *envs, timeout_s=120)
    why = f"metrics can't be served on 127.0.0.1:{port} (Address already in use)"
    assert f"ERROR UsageError {why}" in second.text
    assert f"process 1 (island1) ended by an exception: jaxhet.UsageError: {why}" in first.text
    for one in (first, second):
        assert one.code == 0, one.text
        assert "LEFT" in one.text


def test_metrics_without_the_package_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"needs the package prometheus_client: pip install"):
        _metrics_of("127.0.0.1:9")
