"""Sockets of device channels that a program needs: both processes connect and open them."""

import concurrent.futures
import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jaxhet import _config, _islands, _set_up
from jaxhet._device_channels import plan_channels
from jaxhet._job import connector as _connector
from jaxhet._job.bootstrap import PeerSockets, RankSockets
from jaxhet._job.listener import Link, Listener
from jaxhet._job.process_info import ProcessInfo
from tests.support.members import described
from tests.support.waiting import wait_until


class _Engine:
    """Notes what it is asked to open."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.opened: dict[tuple[int, int], Sequence[Link]] = {}

    def join_peer(self, process: int, peer: PeerSockets) -> None:
        peer.control.socket.close()
        self.joined.append(process)

    def open_channels(
        self,
        pairs: Sequence[tuple[int, int]],
        sockets: Sequence[RankSockets],
        timeout_s: float,
    ) -> None:
        del timeout_s
        assert [(s.rank, s.peer) for s in sockets] == list(pairs)
        self.opened |= {(s.rank, s.peer): s.links for s in sockets}


class _Process:
    """A process of a job with one GPU in each, and its connection to a coordinator."""

    def __init__(self, process: int) -> None:
        self.listener = Listener("127.0.0.1", 0, process, b"secret", bytes(8))
        self.engine = _Engine()
        self.members: list[ProcessInfo] = []
        self.others: list[_Process] = []
        self.has_left = False
        self.failures: list[Exception] = []

    def start(self, others: "list[_Process]", members: list[ProcessInfo], connect: str) -> None:
        own = self.listener.process
        self.others, self.members = others, members
        config = _config.resolve({"connect": connect}, {}).placed(own, len(members))
        connected = frozenset(range(len(members))) - {own}
        if not _connector.connects_all(connect, members):
            connected = frozenset(_connector.partners(own, members))
        devices: Any = [
            types.SimpleNamespace(id=m.process, process_index=m.process) for m in members
        ]
        islands = _islands.make_islands(members, devices)
        channels = plan_channels(config, islands, members, connected)
        stand_in: Any = self
        job = _set_up._Job(config, stand_in, self.listener, stand_in, connected)
        connector = _set_up._make_connector(job, stand_in.engine, channels)
        assert connector is not None
        self.connector = connector
        self.connector.start(self.failures.append)

    # --- as Membership ---

    def check(self) -> None: ...

    def listen_needs(self, on_need: Any, on_absent: Any) -> None:
        self.on_need, self.on_absent = on_need, on_absent

    def ask_for(self, processes: list[int]) -> None:
        for other in processes:
            if self.others[other].has_left:
                self.on_absent(other)
            else:
                self.others[other].on_need(self.listener.process)


@contextlib.contextmanager
def _job(connect: str) -> Iterator[list[_Process]]:
    """Two islands of two processes, each on a host of its own."""
    processes = [_Process(i) for i in range(4)]
    members = [
        described(i, island, process.listener.address, platform="cuda", host_id=str(i))
        for i, (process, island) in enumerate(zip(processes, "aabb", strict=True))
    ]
    for process in processes:
        process.start(processes, members, connect)
    try:
        yield processes
    finally:
        for process in processes:
            process.connector.close()
            for links in process.engine.opened.values():
                for link in links:
                    link.socket.close()


def _check_joined(one: _Process, other: _Process) -> None:
    """Sockets of the same index on both ends are connected, and have the same keys."""
    a, b = one.listener.process, other.listener.process
    ours, theirs = one.engine.opened[a, b], other.engine.opened[b, a]
    assert len(ours) == len(theirs) == 4  # two lanes, each with a socket for messages
    for number, (link, end) in enumerate(zip(ours, theirs, strict=True)):
        link.socket.send(bytes([number]))
        end.socket.setblocking(True)
        assert end.socket.recv(10) == bytes([number])
        assert (link.keys.send, link.keys.receive) == (end.keys.receive, end.keys.send)


@pytest.mark.parametrize(("needs", "needed"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("connect", ["auto", "needed"])
def test_needed_channels_are_opened_by_both_ends(connect: str, needs: int, needed: int) -> None:
    with _job(connect) as processes:
        one, other = processes[needs], processes[needed]
        one.connector.need([needed])
        wait_until(lambda: other.connector.has(needs), 10)
        _check_joined(one, other)
        assert one.engine.joined == ([] if connect == "auto" else [needed])
        assert not processes[2].engine.opened
        assert not any(process.failures for process in processes)


def test_all_channels_can_be_needed_at_once() -> None:
    with _job("needed") as processes, concurrent.futures.ThreadPoolExecutor(4) as pool:
        needed = [[1, 3], [0, 2], [1, 3], [0, 2]]
        list(pool.map(lambda p, others: p.connector.need(others), processes, needed))
        for one, others in zip(processes, needed, strict=True):
            for other in others:
                _check_joined(one, processes[other])
        assert not any(process.failures for process in processes)
