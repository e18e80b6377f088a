"""Two hosts with a long line between them: `tests/support/wire.cc`, and what a job does there."""

import pytest
from two_islands import SET_UP

from tests.support import hosts
from tests.support.hosts import Hosts

pytestmark = pytest.mark.skipif(
    bool(hosts.unavailable_wire()), reason=hosts.unavailable_wire() or "available"
)

# The sockets to the other process that are set up for a long path, and the sums.
_JOB = """
import collections, socket
x = put(np.repeat([[np.float32(1)], [np.float32(2)]], 1 << 20, 1))
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


@pytest.mark.slow
@pytest.mark.parametrize(("delay_ms", "long_sockets"), [(26, 10), (0, 0)])
def test_long_round_trip_gives_a_peer_more_sockets(delay_ms: int, long_sockets: int) -> None:
    with Hosts(2, 0) as net, net.wire(delay_ms, 0):
        ended = hosts.wait(net.start(SET_UP + _JOB, net.job()), 150)
    for one in ended:
        assert one.text.splitlines()[-1:] == [f"right {long_sockets}"], one.text
