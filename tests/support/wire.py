"""A line between two network namespaces that delays packets, and loses some.

    python -m tests.support.wire NAME DELAY_MS LOSS PID PID

Both namespaces, those of the processes PID, get a TAP interface of that name. Each packet arrives
DELAY_MS later, or never (a part LOSS of them). For kernels without netem. Prints "ready"; ends with
its input.
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MOST_BYTES = 1 << 16
_MOST_WAITING = 10_000  # packets: more are dropped, as by a switch


def _open_tap(pid: int, name: str) -> int:
    """A descriptor of a new interface in the process's network namespace."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _write(tap: int, packet: bytes) -> None:
    try:
        os.write(tap, packet)
    except OSError:  # the interface is down, or its queue is full
        return


def _carry(taps: list[int], delay_s: float, loss: float) -> None:
    """Carries packets both ways until the input ends."""
    chosen = random.Random(1)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        limit = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready, _, _ = select.select([*taps, sys.stdin], [], [], limit)
        if sys.stdin in ready:
            return
        for tap in taps:
            if tap not in ready:
                continue
            packet = os.read(tap, _MOST_BYTES)
            if chosen.random() >= loss and len(waiting) < _MOST_WAITING:
                other = taps[1 - taps.index(tap)]
                waiting.append((time.monotonic() + delay_s, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tap, packet = waiting.popleft()
            _write(tap, packet)


def main() -> None:
    name, delay_ms, loss, *pids = sys.argv[1:]
    taps = [_open_tap(int(pid), name) for pid in pids]
    print("ready", flush=True)
    _carry(taps, float(delay_ms) / 1000, float(loss))


if __name__ == "__main__":
    main()
