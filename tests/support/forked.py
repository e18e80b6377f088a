"""Processes of scripts, forked from an interpreter that has imported JAX and jaxhet already.

The import takes a second of processor time, half of a small job. Each process runs its script as
`python -c` does, with its own environment. JAX reads its own variables when it is imported:
`can_fork` refuses them.

A test process has one server. It forks a handler for each call of `run`, and the handler forks the
processes, so that calls can overlap.
"""

import atexit
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener

_READ_AT_IMPORT = ("JAX_", "PYTHON", "LD_", "TF_", "JAXHET_AUTO")


@dataclasses.dataclass(frozen=True)
class _Request:
    script: str
    environments: list[dict[str, str]]
    outputs: list[str]  # files, one for each environment
    folder: str  # working directory
    timeout_s: float


def can_fork(base: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Whether a process with `env` in addition to `base` may start with JAX imported."""
    changed = (name for name, value in env.items() if base.get(name) != value)
    return not any(name.startswith(_READ_AT_IMPORT) for name in changed)


def run(
    script: str, environments: Sequence[Mapping[str, str]], timeout_s: float
) -> list[tuple[int, str]]:
    """Runs `script` once with each environment, all at the same time.

    Returns:
      Exit code (negative: signal) and output of each.

    Raises:
      subprocess.TimeoutExpired: One did not end in time; all are killed.
    """
    with tempfile.TemporaryDirectory(prefix="jaxhet-forked-") as folder:
        outputs = [pathlib.Path(folder, str(i)) for i in range(len(environments))]
        with Client(_server(environments[0]["PYTHONPATH"]), "AF_UNIX") as connection:
            environs, files = [dict(env) for env in environments], [str(path) for path in outputs]
            connection.send(_Request(script, environs, files, os.getcwd(), timeout_s))
            codes: list[int] | None = connection.recv()
        texts = [path.read_text() for path in outputs]
    if codes is None:
        raise subprocess.TimeoutExpired(script, timeout_s, "\n".join(texts))
    return list(zip(codes, texts, strict=True))


@functools.cache
def _server(python_path: str) -> str:
    """Address of this process's server, which ends with it."""
    folder = tempfile.TemporaryDirectory(prefix="jaxhet-forked-")
    address = os.path.join(folder.name, "socket")
    # A thread of OpenBLAS would not exist in the forked processes.
    fixed = {"PYTHONPATH": python_path, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.forked", address]
    server = subprocess.Popen(command, env={**os.environ, **fixed}, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.read(1) == b"\n"  # it listens

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return address


def script_of_a_process(address: str) -> str:
    """Serves until the test process ends. Returns in forked processes, each with its script."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the handlers are not waited for
    listener = Listener(address, "AF_UNIX", backlog=16)
    os.write(1, b"\n")
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    listener._listener._socket.close()  # type: ignore[attr-defined]  # `close` would remove its file
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _handle(connection)


def _handle(connection: Connection) -> str:
    request: _Request = connection.recv()
    os.chdir(request.folder)
    processes = []
    for env, output in zip(request.environments, request.outputs, strict=True):
        processes.append(os.fork())
        if processes[-1] == 0:
            connection.close()
            _become(env, output)
            return request.script
    connection.send(_wait(processes, request.timeout_s))
    os._exit(0)


def _become(env: dict[str, str], output: str) -> None:
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c"]


def _wait(processes: list[int], timeout_s: float) -> list[int] | None:
    deadline = time.monotonic() + timeout_s
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process in codes:
                continue
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
        if time.monotonic() > deadline:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return None
    return [codes[process] for process in processes]


if __name__ == "__main__":
    import jax.numpy  # noqa: F401

    from jaxhet import initialize  # noqa: F401
    from tests.support import forked

    code = compile(forked.script_of_a_process(sys.argv[1]), "<string>", "exec")
    for name in [name for name in globals() if not name.startswith("__") and name != "code"]:
        del globals()[name]
    exec(globals().pop("code"))
