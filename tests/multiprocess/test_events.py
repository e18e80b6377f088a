"""Events of a job as listeners of `jax.monitoring` receive them."""

import jax
import pytest

from jaxhet._telemetry import events as _events
from tests.support import scripts

_SCRIPT = """
import os, time
import jax, jaxhet, numpy as np

def show(*values, **labels): print("event", *values, sorted(labels.items()), flush=True)

jax.monitoring.register_event_listener(lambda e, **l: e.startswith("/jaxhet") and show(e, **l))
jax.monitoring.register_event_duration_secs_listener(
    lambda e, s, **l: e.startswith("/jaxhet") and show(e, 0 < s < 60, **l))
jax.monitoring.register_scalar_listener(
    lambda e, v, **l: e.startswith("/jaxhet") and show(e, v, **l))
jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": -1})
same = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
jaxhet.check_replicas([jax.device_put(np.arange(3.0), same), jax.device_put(np.ones(2), same)])
if jax.process_index(): os._exit(3)
deadline = time.monotonic() + 20
while jaxhet.last_error() is None and time.monotonic() < deadline: time.sleep(0.05)
time.sleep(0.5)  # for the thread that records
"""


def test_listener_receives_the_events_of_a_job() -> None:
    first, _ = scripts.run(_SCRIPT, *scripts.job())
    labels = "('island', 'island0'), ('process', 0)"
    events = [line for line in first.text.splitlines() if line.startswith("event ")]
    assert events == [
        f"event /jaxhet/joined True [{labels}]",
        f"event /jaxhet/replicas_checked 2 [{labels}]",
        f"event /jaxhet/replicas_differing 0 [{labels}]",
        f"event /jaxhet/failed [('error', 'PeerError'), {labels}]",
    ], first.text


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str | int]]]:
    """Events that listeners receive."""
    seen: list[tuple[str, dict[str, str | int]]] = []
    monkeypatch.setattr(
        jax.monitoring, "record_event", lambda e, **labels: seen.append((e, labels))
    )
    return seen


def test_each_path_failure_is_an_event(heard: list[tuple[str, dict[str, str | int]]]) -> None:
    events = _events.Events(0, "a")
    for failures in (0, 1, 1, 3):
        events.count_path_failures(
            [{"process": 2, "transport": "socket", "path_failures": failures}]
        )
    labels = {"process": 0, "island": "a", "peer": 2, "transport": "socket"}
    assert heard == [("/jaxhet/path_failed", labels)] * 3


def test_listener_that_raises_is_named_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(event: str, **_: str | int) -> None:
        raise ValueError("no disk")

    monkeypatch.setattr(jax.monitoring, "record_event", broken)
    _events.Events(0, "a").failed("PeerError")
    said = capsys.readouterr().err
    assert "a listener of jax.monitoring failed at /jaxhet/failed: ValueError('no disk')" in said
