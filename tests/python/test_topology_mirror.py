"""One set of devices out of several plugins: against a fake store, and JAX's coordination service.

The processes do what XLA's backends do: each puts its message under
the names of its plugin, process 0 gets all under its own, the others get what it makes of them.
"""

import concurrent.futures
import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from jaxhet._errors import PeerError
from jaxhet._gpu import topology_mirror
from jaxhet._gpu.topology_mirror import TopologyMirror
from jaxhet._jax import compat, jaxlib
from jaxhet._job.process_info import ProcessInfo, disagreement
from tests.support.members import described
from tests.support.store import Store

CUDA, ROCM, DOUBLE = ("cuda", "cuda"), ("rocm", "rocm"), ("rocm", "cuda")


def _info(process: int, topology: tuple[str, str] = CUDA, **changes: Any) -> ProcessInfo:
    fields = {"platform": topology[0], "topology": topology, **changes}
    return described(process, topology[0], **fields)


def _members(*topologies: tuple[str, str]) -> list[ProcessInfo]:
    return [_info(process, topology) for process, topology in enumerate(topologies)]


# Keys that are copied.


def test_nothing_is_copied_for_one_plugin() -> None:
    assert topology_mirror.copies(_members(CUDA, CUDA)) == []
    TopologyMirror(Store(), _members(CUDA, CUDA)).finish()


def test_messages_go_to_the_names_of_process_0_and_the_whole_comes_back() -> None:
    copied = topology_mirror.copies(_members(ROCM, CUDA, ROCM, DOUBLE, CUDA))
    assert [(c.info.process, c.source, c.target) for c in copied] == [
        (1, "cuda:local_topology/cuda/1", "rocm:local_topology/rocm/1"),
        (3, "rocm:local_topology/cuda/3", "rocm:local_topology/rocm/3"),
        (4, "cuda:local_topology/cuda/4", "rocm:local_topology/rocm/4"),
        (0, "rocm:global_topology/rocm", "cuda:global_topology/cuda"),
        (0, "rocm:global_topology/rocm", "rocm:global_topology/cuda"),
    ]


# Copying.


def _exchange(client: Any, info: ProcessInfo, members: list[ProcessInfo]) -> bytes:
    """Plays the backend of a process; returns the job's devices as it sees them."""
    key = compat.local_topology_key(info.topology, info.process)
    client.key_value_set_bytes(key, f"devices of {info.process};".encode())
    whole = compat.global_topology_key(info.topology)
    if info.process == 0:
        keys = (compat.local_topology_key(info.topology, m.process) for m in members)
        messages = [client.blocking_key_value_get_bytes(key, 10_000) for key in keys]
        client.key_value_set_bytes(whole, b"".join(messages))
    return client.blocking_key_value_get_bytes(whole, 10_000)


def _all_see(clients: list[Any], members: list[ProcessInfo]) -> list[bytes]:
    with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
        mirror = TopologyMirror(clients[0], members, timeout_s=10)
        seen = list(pool.map(_exchange, clients, members, [members] * len(members)))
        mirror.finish()
    return seen


ALL = b"devices of 0;devices of 1;devices of 2;"


@contextlib.contextmanager
def _clients(count: int) -> Iterator[list[Any]]:
    """Clients of a coordination service, one for each process."""
    address, service = jaxlib.start_coordination_service("127.0.0.1", count, {})
    clients = [
        _jax.get_distributed_runtime_client(address, i, init_timeout=20, shutdown_timeout=5)
        for i in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        yield clients
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


@pytest.mark.parametrize(
    "topologies", [(CUDA, ROCM, DOUBLE), (ROCM, CUDA, CUDA), (CUDA, CUDA, CUDA)]
)
def test_every_process_sees_all_devices(topologies: tuple[tuple[str, str], ...]) -> None:
    with _clients(3) as clients:
        assert _all_see(clients, _members(*topologies)) == [ALL] * 3


# Failure.


def test_process_that_does_not_come_is_named() -> None:
    store, members = Store(), _members(CUDA, ROCM, ROCM, ROCM)
    store.key_value_set_bytes("rocm:local_topology/rocm/2", b"there")
    mirror = TopologyMirror(store, members, timeout_s=0.1)
    with pytest.raises(PeerError) as caught:
        mirror.finish()
    assert str(caught.value) == (
        "process 1 (rocm, pid 101 on host), process 3 (rocm, pid 103 on host) did not publish its"
        " devices within 0.1 s (DEADLINE_EXCEEDED: timed out); its output says why its backend did"
        " not start"
    )
    with pytest.raises(PeerError):
        mirror.check()


def test_process_0_is_named_if_the_others_connected() -> None:
    store, members = Store(), _members(CUDA, ROCM)
    store.key_value_set_bytes("rocm:local_topology/rocm/1", b"there")
    with pytest.raises(PeerError, match=r"^process 0 \(cuda, pid 100 on host\) did not publish"):
        TopologyMirror(store, members, timeout_s=0.1).finish()


def test_blocked_backends_and_the_mirror_are_freed_by_answers_that_are_not_valid() -> None:
    store, members = Store(), _members(CUDA, ROCM, ROCM)
    store.key_value_set_bytes("rocm:local_topology/rocm/1", b"there")
    mirror = TopologyMirror(store, members)
    start = time.monotonic()
    topologies = {("cpu", "cpu"), *(info.topology for info in members)}
    compat.unblock_backend(store, topologies, range(3))
    mirror.finish()
    assert time.monotonic() - start < 5
    assert store.values["rocm:local_topology/rocm/1"] == b"there"
    for plugin in ("cpu", "cuda", "rocm"):
        assert store.values[f"{plugin}:local_topology/{plugin}/2"] == b"\xff"
        assert store.values[f"{plugin}:global_topology/{plugin}"] == b"\xff"


# Descriptions of processes.


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"platform": "cpu"}, "is on cuda and process 1 .* on cpu: a job has CPUs or GPUs; set"),
        ({"has_cpu": False}, r"process 0 .* has a CPU backend .*, and process 1 .* has none; set"),
    ],
)
def test_backends_that_would_wait_for_each_other(theirs: dict[str, Any], words: str) -> None:
    mine, other = _info(0), _info(1, ROCM, **theirs)
    assert re.search(words, disagreement(mine, other) or "")
    assert disagreement(other, mine)
    assert disagreement(mine, _info(1, ROCM)) is None
