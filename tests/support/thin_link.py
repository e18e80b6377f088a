"""`benchmarks.thin_links` between two network namespaces with a thin line between them. Needs root.

    python -m tests.support.thin_link MBIT_S RTT_MS LOSS [arguments of benchmarks.thin_links]

A token bucket limits the rate of each direction (tbf). With a round trip above 0, packets go
through `tests/support/wire.py`, which delays them and loses a part LOSS.
"""

import sys

from tests.support import hosts
from tests.support.hosts import Hosts

_PROGRAM = """
import sys
sys.argv = {arguments!r}
import benchmarks.thin_links
benchmarks.thin_links.main()
"""


def main(mbit_s: int, rtt_ms: float, loss: float, arguments: list[str]) -> None:
    """Prints what both processes print."""
    link = f"{mbit_s} Mbit/s, {rtt_ms:g} ms, {loss:.1%} lost"
    program = _PROGRAM.format(arguments=["thin_links", "--link", link, *arguments])
    with Hosts(2, 1, None if rtt_ms else mbit_s) as net:
        common: dict[str, str] = {}
        if rtt_ms:
            net.wire(round(rtt_ms / 2), loss)
            for host in (0, 1):
                net.shape(host, 1, mbit_s)
            common["JAXHET_COORDINATOR_ADDRESS"] = f"{net.address(0, 1)}:7000"
            common["JAXHET_SOCKET_INTERFACES"] = "eth1"
        for ended in hosts.wait(net.start(program, net.job(**common)), 7200):
            print(ended.text)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
