"""`python -m jaxhet._launch.remote`: runs one process of a job for a launcher on another host.

The launcher starts it by ssh and talks to it through ssh's pipes, line by line:

    here → launcher  `READY`                    on stdout, before anything of the command
    launcher → here  {"command": [word], …}     an `Order`, which holds the job secret
                     15                         a signal for the command's process group

The end of stdin says that the launcher or the connection is gone: the group is killed, so that
nothing outlives the job. The exit code is the command's, or 128 + n where signal n ended it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from jaxhet._errors import UsageError
from jaxhet._launch import environ

READY = b"jaxhet-remote: ready"
SIGNALLED = 128  # plus the number: the exit code of a command that a signal ended
_STRAGGLER_S = 1.0  # from SIGTERM to SIGKILL for processes that the ended command left
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class Order:
    """Command that the launcher sends to a host.

    Attributes:
      command: Program and arguments.
      env: The user's variables; they win over this host's variables.
      assigned: The launcher's variables, the job secret among them.
      wanted: Devices of each of the job's processes on this host, as `environ.complete` has them.
      index: Index of this process among them.
    """

    command: list[str]
    env: dict[str, str]
    assigned: dict[str, str]
    wanted: list[int | None]
    index: int

    def line(self) -> bytes:
        """The order as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def _environment(order: Order) -> dict[str, str]:
    """Environment of the command, in which `python` is the one that runs this file."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    base = {**os.environ, "PATH": path, **order.env}
    return environ.complete(base, order.assigned, order.wanted, order.index)


def _start(order: Order) -> subprocess.Popen[bytes]:
    env = _environment(order)
    try:
        return subprocess.Popen(
            order.command, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise SystemExit(f"cannot run {order.command[0]!r}: {error.strerror}") from None


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signals the process's group; returns whether it exists (number 0 only asks)."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _follow(process: subprocess.Popen[bytes], orders: BinaryIO) -> None:
    """Passes signals on until the launcher ends, then kills the group."""
    with contextlib.suppress(ValueError):  # a line that was cut
        for line in orders:
            _signal_group(process, int(line))
    _signal_group(process, signal.SIGKILL)


def _end_stragglers(process: subprocess.Popen[bytes]) -> None:
    """Kills the processes that remain in the group of an ended process."""
    deadline = time.monotonic() + _STRAGGLER_S
    is_there = _signal_group(process, signal.SIGTERM)
    while is_there and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        is_there = _signal_group(process, 0)
    if is_there:
        _signal_group(process, signal.SIGKILL)


def main() -> None:
    """Runs an order. Does not return."""
    sys.stdout.buffer.write(READY + b"\n")
    sys.stdout.flush()
    orders = sys.stdin.buffer
    line = orders.readline()
    if not line:  # the launcher is gone
        raise SystemExit(1)
    try:
        process = _start(Order(**json.loads(line)))
    except UsageError as error:
        raise SystemExit(f"jaxhet.UsageError: {error}") from None
    threading.Thread(target=_follow, args=(process, orders), daemon=True).start()
    code = process.wait()
    _end_stragglers(process)
    os._exit(code if code >= 0 else SIGNALLED - code)  # the thread may hold stdin's lock


if __name__ == "__main__":
    main()
