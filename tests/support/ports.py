"""Ports for servers that a test starts."""

import contextlib
import random
import socket

_random = random.SystemRandom()  # tests seed the other one


def free_port() -> int:
    """A port that nobody uses, and that the system gives to nobody who asks for any."""
    while True:
        port = _random.randrange(10_000, 32_000)  # below Linux's range for connections
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
