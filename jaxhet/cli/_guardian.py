"""Ends the processes of a job after any end of their launcher.

The launcher holds one end of a pipe, the guardian reads the other. A process of the job writes its
process group into the pipe before it becomes the user's program, the launcher writes the negative
number when the group has ended, and at the end of the pipe the guardian kills every remaining
group. It misses none: a process that has not registered yet holds the pipe open itself.

The file is run as a script, so that no process waits for `import jaxhet`; standard library only.
"""

import contextlib
import os
import signal
import sys


def entry(group: int) -> bytes:
    """The line that registers a process group, or with the negative number removes it."""
    return b"%d\n" % group


def guard() -> None:
    """Reads process groups from stdin until its end, then kills the remaining ones."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        if group > 0:
            groups.add(group)
        else:
            groups.discard(-group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def register_and_run(pipe: int, command: list[str]) -> None:
    """Registers this process group with the guardian and becomes `command`. Does not return."""
    os.write(pipe, entry(os.getpgrp()))
    os.close(pipe)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        guard()
    else:
        register_and_run(int(sys.argv[1]), sys.argv[2:])
