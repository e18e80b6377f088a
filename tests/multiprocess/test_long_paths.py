"""Two hosts with a long line between them: `tests/support/wire.cc`, and what a job does there."""

import re

import pytest

from tests.support import hosts
from tests.support.hosts import Hosts

pytestmark = pytest.mark.skipif(
    bool(hosts.unavailable_wire()), reason=hosts.unavailable_wire() or "available"
)

_SEND = """
import socket, time
time.sleep(0.2)
with socket.create_connection(("10.77.0.1", 5001)) as sock:
    for _ in range(8): sock.sendall(bytes(range(256)) * 4096)
    sock.shutdown(socket.SHUT_WR)
    sock.recv(1)
"""
_RECEIVE = """
import hashlib, socket, time
server = socket.create_server(("10.77.0.1", 5001))
sock, _ = server.accept()
began, found = time.monotonic(), bytearray()
while part := sock.recv(1 << 20): found += part
seconds = time.monotonic() - began
round_trip_us = int.from_bytes(sock.getsockopt(6, socket.TCP_INFO, 152)[148:], "little")
print(found == bytes(range(256)) * 4096 * 8, seconds, round_trip_us)
"""
# The sockets to the other process that are set up for a long path, and the sums.
_JOB = """
import collections, os, socket
import jax, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jaxhet.initialize()
mesh = jaxhet.make_mesh({"x": -1})
own = np.full((1, 1 << 20), 1 + jax.process_index(), np.float32)
x = jax.make_array_from_callback((2, 1 << 20), NamedSharding(mesh, P("x")), lambda i: own)
total = np.asarray(jaxhet.jit(lambda a: a.sum(0))(x).addressable_data(0))
found = collections.Counter()
for name in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(name))) as sock:
            found[sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)] += 1
    except OSError:
        pass
print("right" if (total == 3).all() else total, found[1 << 18], flush=True)
jaxhet.shutdown()
"""


def test_wire_has_a_rate_a_delay_and_losses() -> None:
    with Hosts(2, 0) as net, net.wire(20, 0.01, 100) as wire:
        receiver, sender = hosts.wait(net.start_each((_RECEIVE, _SEND)), 100)
        counts, _ = wire.communicate()
    assert (receiver.code, sender.code) == (0, 0), receiver.text + sender.text
    is_whole, seconds, round_trip_us = receiver.text.split()
    assert is_whole == "True"
    assert float(seconds) > 0.9 * 8 * (8 << 20) / 100e6
    assert int(round_trip_us) >= 40_000
    packets, lost, _, failed = map(int, re.findall(r"\d+", counts.splitlines()[1]))
    assert packets > (8 << 20) / 1460
    assert 0.005 * packets < lost < 0.02 * packets  # 58 are expected: 4 standard deviations
    assert failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(("delay_ms", "long_sockets"), [(25, 3), (0, 0)])
def test_long_round_trip_gives_a_peer_more_sockets(delay_ms: int, long_sockets: int) -> None:
    with Hosts(2, 0) as net, net.wire(delay_ms, 0):
        ended = hosts.wait(net.start(_JOB, net.job()), 150)
    for one in ended:
        assert one.text.splitlines()[-1:] == [f"right {long_sockets}"], one.text
