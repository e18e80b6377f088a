"""The coordinator in a process of its own.

python -m jaxhet._job.coordinator_process ADDRESS NUM_PROCESSES TIMEOUT_S
"""

import json
import os
import sys
import threading

from jaxhet._errors import UsageError
from jaxhet._job.coordinator import Coordinator, Terms
from jaxhet._net.addresses import listen


def _read_owner(coordinator: Coordinator) -> None:
    """Reads the owner's lines on stdin: {"process": i, "text": …} ended. End of file: stop."""
    for line in sys.stdin:
        event = json.loads(line)
        coordinator.announce_exit(event["process"], event["text"])
    coordinator.owner_is_gone()


def main() -> None:
    """Runs a coordinator; prints `ready` on stdout once it listens, or one line with the error."""
    address, num_processes, timeout_s = sys.argv[1:]
    secret = os.environ.pop("JAXHET_JOB_SECRET").encode()
    try:
        terms = Terms(int(num_processes), float(timeout_s))
        coordinator = Coordinator(listen(address), secret, terms)
    except UsageError as error:
        print(f"error {error}", flush=True)
        raise SystemExit(1) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"error the coordinator of the job could not start: {reason}", flush=True)
        raise
    print("ready", flush=True)
    threading.Thread(target=_read_owner, args=(coordinator,), daemon=True).start()
    coordinator.serve()


if __name__ == "__main__":
    main()
