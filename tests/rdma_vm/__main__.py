"""Runs a shell command in a guest with soft-RoCE: python -m tests.rdma_vm [--pair] COMMAND.

The command finds the host's files, in the project's root; what it writes is lost. With --pair it
runs in two guests at the same time, with PROCESS=0 and 1, at 10.77.0.1 and 10.77.0.2.
"""

import argparse
import sys

from tests.rdma_vm.guest import GuestError, boot, boot_pair
from tests.rdma_vm.image import UnavailableError, make


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.rdma_vm", description=__doc__)
    parser.add_argument("--pair", action="store_true", help="two guests")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the command")
    parser.add_argument("command")
    arguments = parser.parse_args()
    try:
        image = make()
    except UnavailableError as error:
        sys.exit(f"no virtual machine: {error}")
    guests = boot_pair(image) if arguments.pair else (boot(image),)
    names = [g.start(arguments.command, {"PROCESS": str(i)}) for i, g in enumerate(guests)]
    try:
        ended = [g.wait(n, arguments.timeout) for g, n in zip(guests, names, strict=True)]
    except GuestError as error:
        sys.exit(str(error))
    finally:
        for guest in guests:
            guest.close()
    for guest, end in zip(guests, ended, strict=True):
        print(f"-- {guest.address}: {end.code}\n{end.text}", end="")
    return max(end.code for end in ended)


if __name__ == "__main__":
    sys.exit(main())
