"""Damaged copies of sound inputs, for the fuzzers of Python code.

Environment: FUZZ_SECONDS, the time of each fuzzer, and FUZZ_SEED, the seed of its first input.
"""

import contextlib
import copy
import dataclasses
import ipaddress
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxhet._net import handshake
from jaxhet._net.channel import Channel
from jaxhet._net.interfaces import Interface
from tests.support.members import described

OURS = handshake.Keys(send=bytes(32), receive=bytes(31) + b"1")
THEIRS = handshake.Keys(send=OURS.receive, receive=OURS.send)
_SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.3"))
_SEED = int(os.environ.get("FUZZ_SEED", "1"))
_NUMBERS = (0, 1, -1, 255, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"))
_TEXTS = ("", "x", "\0", "\ud800", "x=1", "x=" + "9" * 5_000)
_VALUES = (*_NUMBERS, *_TEXTS, None, True, [], {}, [[]], ["x"], {"x": "x"})


def inputs(seeds: list[Any], damage: Callable[[Any, random.Random], Any]) -> Iterator[Any]:
    """The seeds, then damaged copies of them for as long as a fuzzer has."""
    yield from copy.deepcopy(seeds)
    deadline = time.monotonic() + _SECONDS
    count = 0
    while time.monotonic() < deadline or count < 20:
        chosen = random.Random(_SEED + count)
        yield damage(copy.deepcopy(chosen.choice(seeds)), chosen)
        count += 1
    print(f"{count} executions")


def damage_bytes(data: bytes, chosen: random.Random) -> bytes:
    """Removes, inserts or changes some bytes."""
    changed = bytearray(data)
    for _ in range(chosen.randint(1, 4)):
        at = chosen.randrange(len(changed) + 1)
        match chosen.randrange(4):
            case 0:
                del changed[at : at + chosen.randrange(24)]
            case 1:
                changed[at:at] = chosen.randbytes(chosen.randrange(24))
            case 2:
                changed[at : at + 4] = chosen.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
            case _:
                changed[at : at + 1] = chosen.randbytes(1)
    return bytes(changed)


def damage_json(value: Any, chosen: random.Random) -> Any:
    """Replaces, removes or adds something at a random place."""
    if isinstance(value, dict) and value and chosen.random() < 0.9:
        name = chosen.choice(list(value))
        match chosen.randrange(6):
            case 0:
                del value[name]
            case 1:
                value[chosen.choice(("", "x", name + "x"))] = value[name]
            case _:
                value[name] = damage_json(value[name], chosen)
        return value
    if isinstance(value, list) and value and chosen.random() < 0.7:
        i = chosen.randrange(len(value))
        value[i] = damage_json(value[i], chosen)
        return value
    return chosen.choice(_VALUES)


@contextlib.contextmanager
def said(message: Any) -> Iterator[tuple[socket.socket, Channel]]:
    """A socket on which a peer has said this, and then no more; and our channel of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(theirs, THEIRS).send(message)
        theirs.shutdown(socket.SHUT_WR)
        yield ours, Channel(ours, OURS)


@contextlib.contextmanager
def received(data: bytes) -> Iterator[socket.socket]:
    """A socket whose peer has sent these bytes and then closed the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours


def process_info_of(process: int) -> dict[str, Any]:
    """A sound description in a job of two processes, as JSON has it."""
    interface = Interface("eth1", ipaddress.ip_interface(f"10.0.1.{process}/24"), port=9000)
    info = described(process, f"island{process}", interfaces=(interface.announced(),))
    return json.loads(json.dumps(dataclasses.asdict(info)))
