"""Transports between pairs of processes: two engines, in two processes of this host, try them.

One is here, the other one in a child that runs this file. They decide as in a job, so that the
reasons are the engine's own.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from jaxhet import _config, _ffi, _set_up
from jaxhet._config import Config
from jaxhet._doctor.report import Path
from jaxhet._errors import JaxhetError
from jaxhet._job.bootstrap import PeerSockets
from jaxhet._job.listener import Link
from jaxhet._job.process_info import ProcessInfo
from jaxhet._net import handshake
from jaxhet._paths import Refusal

_START_TIMEOUT_S = 60.0  # for the child to import JAX
_CLOSE_TIMEOUT_MS = 5000


_PAIRS = ("same host", "other host")
_NO_SECRET = handshake.Keys(bytes(32), bytes(32))  # the sockets are between parent and child


def try_paths() -> tuple[Path, ...]:
    """The transport of two processes of one host, and of two hosts, and why not a better one."""
    sockets = [_socketpairs() for _ in _PAIRS]
    theirs = [[end.detach() for _, end in pair] for pair in sockets]
    with subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(theirs)],
        pass_fds=[fd for fds in theirs for fd in fds],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the engine here reports the peer's errors
    ):
        for fd in (fd for fds in theirs for fd in fds):
            os.close(fd)
        ours = [[end for end, _ in pair] for pair in sockets]
        return tuple(_path(0, pair, ends) for pair, ends in zip(_PAIRS, ours, strict=True))


def _serve(fds: Sequence[Sequence[int]]) -> None:
    """Serves the other end of each trial, in the child."""
    for pair, ends in zip(_PAIRS, fds, strict=True):
        _path(1, pair, [socket.socket(fileno=fd) for fd in ends])


def _socketpairs() -> list[tuple[socket.socket, socket.socket]]:
    """Socket pairs of one trial: one for control, and one for data."""
    pairs = [socket.socketpair() for _ in range(2)]
    for end in (end for pair in pairs for end in pair):
        end.setblocking(False)
    return pairs


def _path(process: int, pair: str, ends: Sequence[socket.socket]) -> Path:
    """Chooses a transport together with the other end. The engine owns `ends` afterwards."""
    config = _config.resolve({"connect_timeout_s": _START_TIMEOUT_S}).placed(process, 2)
    control, *data = (Link(end, _NO_SECRET) for end in ends)
    peer = PeerSockets(control, tuple(data))
    try:
        engine = _ffi.Engine.start(config, _infos(config, pair), {1 - process: peer})
        transport, refused = engine.path_to(1 - process)
        engine.close(_CLOSE_TIMEOUT_MS)
    except JaxhetError as error:
        return Path(pair, "", (Refusal("all", str(error)),))
    return Path(pair, transport, tuple(Refusal(name, reason) for name, reason in refused))


def _infos(config: Config, pair: str) -> list[ProcessInfo]:
    own = _set_up.make_process_info(config, "")
    hosts = [own.host_id] * 2 if pair == "same host" else ["one", "other"]
    return [dataclasses.replace(own, process=i, host_id=host) for i, host in enumerate(hosts)]


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
