"""Jobs on one machine for tests of programs: islands, or one ordinary JAX world to compare with.

A job's processes run functions that they are sent (`run_on_islands`, `run_in_one_world`), or a
script of the caller's (`island_job`, `world_job`, `joined_job`) that answers requests (`serve`).
Jobs run on CPU unless `env` says more. A process finds modules in the folders of the caller's
`sys.path`, so that it imports what the caller imports.

An AssertionError carries the output of the job's processes.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Self

from jaxhet import _config
from jaxhet._launch.gpus import Gpus

# Value of `env` that turns LLVM's optimizations off: compilation takes a fifth of the time. HLO is
# the same.
FAST_COMPILE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
HIDE_GPUS = "HIDE_OTHER_GPUS"  # set: a process sees only the GPUs that JAX takes there
_START_TIMEOUT_S = 180
_POLL_S = 0.5  # between looks at processes that may have ended
_WORLD = "JOINED_WORLD"  # address, processes and id of a process of `joined_job`
_random = random.SystemRandom()  # a test may seed the module's own


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a job.

    Attributes:
      islands: Number of islands.
      processes: Number of processes in each island, or a tuple with a number for each island.
      devices: Number of devices in each process, or a tuple with a number for each island.
    """

    islands: int
    processes: int | tuple[int, ...] = 1
    devices: int | tuple[int, ...] = 1

    @property
    def devices_of_processes(self) -> tuple[int, ...]:
        """Number of devices of each process."""
        sizes = zip(self._each(self.processes), self._each(self.devices), strict=True)
        return tuple(devices for processes, devices in sizes for _ in range(processes))

    @property
    def num_processes(self) -> int:
        """Number of processes in the job."""
        return len(self.devices_of_processes)

    @property
    def num_devices(self) -> int:
        """Number of devices in the job."""
        return sum(self.devices_of_processes)

    def _each(self, numbers: int | tuple[int, ...]) -> tuple[int, ...]:
        return (numbers,) * self.islands if isinstance(numbers, int) else numbers

    def __str__(self) -> str:
        return f"{self.islands}x{_text(self.processes, '+')}x{_text(self.devices, '+')}"


def _text(numbers: int | tuple[int, ...], separator: str) -> str:
    return str(numbers) if isinstance(numbers, int) else separator.join(map(str, numbers))


class Job:
    """The running processes of one job. A context manager, which closes the job.

    Attributes:
      log: File with the output of all processes.
      is_broken: Whether a process ended or did not answer. The job can't be used any more.
    """

    def __init__(self, commands: list[tuple[list[str], dict[str, str]]], num_workers: int):
        self._folder = tempfile.TemporaryDirectory(prefix="jaxhet-job-")
        address = os.path.join(self._folder.name, "socket")
        self._listener = Listener(address, "AF_UNIX", backlog=64)
        self.log = pathlib.Path(self._folder.name, "log.txt")
        with self.log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    [*command, address],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
                for command, env in commands
            ]
        self.is_broken = False
        self._workers: list[Connection] = []
        self._accept(num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self.is_broken = True  # the caller's error is the first one
        self.close()

    def ask(self, request: Any, timeout_s: float = 120) -> list[Any]:
        """Sends `request` to every process; returns their answers, in the order of process ids.

        Raises:
          AssertionError: a process ended, or did not answer in time.
        """
        try:
            for connection in self._workers:
                connection.send(request)
        except ConnectionError:
            self.is_broken = True
            raise AssertionError(f"a process ended:\n{self.log.read_text()}") from None
        return [self._receive(connection, timeout_s) for connection in self._workers]

    def close(self) -> None:
        """Ends the job.

        Raises:
          AssertionError: the job did not end in time, or a process failed.
        """
        if self.is_broken:
            self._kill()
            self._discard()
            return
        for connection in self._workers:
            with contextlib.suppress(ConnectionError):  # it has ended; its exit code says how
                connection.send(None)
        try:
            codes = [process.wait(60) for process in self._processes]
        except subprocess.TimeoutExpired:
            self._kill()
            codes = None
        text = self.log.read_text()
        self._discard()
        assert codes is not None, f"the job did not end:\n{text}"
        assert not any(codes), f"the job ended with {codes}:\n{text}"

    def _accept(self, num_workers: int) -> None:
        listening = self._listener._listener._socket  # type: ignore[attr-defined]
        listening.settimeout(_POLL_S)
        end = time.monotonic() + _START_TIMEOUT_S
        while len(self._workers) < num_workers:
            try:
                self._workers.append(self._listener.accept())
            except TimeoutError:
                has_ended = any(process.poll() is not None for process in self._processes)
                if not has_ended and time.monotonic() < end:
                    continue
                self._kill()
                what = "a process ended before it was ready" if has_ended else "it is not ready"
                text = self.log.read_text()
                self._discard()
                raise AssertionError(f"the job did not start: {what}:\n{text}") from None

    def _receive(self, connection: Connection, timeout_s: float) -> Any:
        try:
            if wait([connection], timeout_s):
                return connection.recv()
        except (EOFError, ConnectionError):
            self.is_broken = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(30)  # for the summary in the log
            raise AssertionError(f"a process ended:\n{self.log.read_text()}") from None
        self.is_broken = True
        raise AssertionError(f"no answer within {timeout_s} s:\n{self.log.read_text()}")

    def _discard(self) -> None:
        for connection in self._workers:
            connection.close()
        self._listener.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_on_islands(
    function: Callable[..., Any],
    shape: Shape,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Calls a function in all processes of a job of islands, which have called `initialize`.

    Args:
      function: Function of a module that the processes can import. Its arguments and its result
        must be of types that can be pickled: NumPy arrays, but no JAX arrays.
      shape: Size of the job.
      *args: Arguments of the function.
      env: Further environment of the processes, for example `FAST_COMPILE`.
      timeout_s: Longest time of the call.

    Returns:
      The result of each process, in the order of process ids.

    Raises:
      AssertionError: a process failed or did not answer in time; holds all processes' output.

    Example:
      ::

        from jaxhet import testing

        def losses():  # in a module of yours
            return [float(step(i)) for i in range(10)]

        def test_islands_train_like_one_world():
            islands = testing.run_on_islands(losses, testing.Shape(islands=2, devices=2))
            (world,) = testing.run_in_one_world(losses, num_devices=4)
            assert islands == [world, world]
    """
    with island_job(shape, None, env) as job:
        return job.ask((function, args), timeout_s)


def run_in_one_world(
    function: Callable[..., Any],
    num_devices: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Calls a function in one process with JAX's devices and no jaxhet, to compare with islands.

    Arguments, result and errors are as in `run_on_islands`; the list has one result.

    Args:
      function: Function of a module that the process can import.
      num_devices: Number of virtual CPU devices.
      *args: Arguments of the function.
      env: Further environment of the process.
      timeout_s: Longest time of the call.

    Raises:
      AssertionError: the process failed, or did not answer in time.
    """
    with world_job(num_devices, None, env) as job:
        return job.ask((function, args), timeout_s)


def island_job(
    shape: Shape, worker: pathlib.Path | None = None, env: Mapping[str, str] | None = None
) -> Job:
    """Starts a job of islands with `jaxhet launch`.

    Args:
      shape: Size of the job.
      worker: Script that calls `serve`. None: requests are pairs of a function and its arguments.
      env: Further environment of the processes.

    Raises:
      AssertionError: the job did not start.
    """
    launch = [sys.executable, "-m", "jaxhet.cli", "launch", "--islands", str(shape.islands)]
    processes, devices = _text(shape.processes, ","), _text(shape.devices, ",")
    sizes = ["--processes-per-island", processes, "--devices", devices]
    return Job(
        [([*launch, *sizes, "--", *_command(worker)], _environment(env))], shape.num_processes
    )


def world_job(
    num_devices: int, worker: pathlib.Path | None = None, env: Mapping[str, str] | None = None
) -> Job:
    """Starts an ordinary JAX world of one process. Arguments: see `island_job`.

    Args:
      num_devices: Number of virtual CPU devices.
      worker: Script that calls `serve`, or None.
      env: Further environment of the process.

    Raises:
      AssertionError: the process did not start.
    """
    devices = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    return Job([(_command(worker), _environment({**devices, **(env or {})}))], 1)


def joined_job(
    shape: Shape,
    worker: pathlib.Path | None = None,
    env: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
) -> Job:
    """Starts an ordinary JAX world of several processes, joined by Gloo, or by NCCL on GPUs.

    Args:
      shape: Size of the job.
      worker: Script that calls `serve`, or None.
      env: Further environment of the processes.
      gpus: Names of GPUs. Each process in turn gets as many as it has devices.

    Raises:
      AssertionError: the job did not start.
    """
    address = f"127.0.0.1:{free_port()}"
    commands = []
    left = list(gpus)
    for process, devices in enumerate(shape.devices_of_processes):
        world = {
            "JAX_NUM_CPU_DEVICES": str(devices),
            _WORLD: f"{address} {shape.num_processes} {process} {devices}",
        }
        if gpus:
            world |= Gpus("cuda", tuple(gpus)).environment(left[:devices])
            del left[:devices]
        commands.append((_command(worker), _environment({**world, **(env or {})})))
    return Job(commands, shape.num_processes)


def free_port() -> int:
    """A free port outside of the range from which the kernel picks ports."""
    while True:
        port = _random.randrange(10_000, 32_000)  # below Linux's range for connections
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def import_path() -> str:
    """Value of PYTHONPATH with which a subprocess imports the modules that this process imports."""
    paths = sysconfig.get_paths()  # a subprocess has these anyway
    installed = [pathlib.Path(paths[key]) for key in ("stdlib", "purelib", "platlib")]
    folders = [pathlib.Path(path).absolute() for path in sys.path if not path.endswith(".zip")]
    own = [str(f) for f in folders if not any(f.is_relative_to(other) for other in installed)]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, (*own, *given))))


def join() -> None:
    """Joins the job that started this process. For scripts that do without `serve`."""
    import jax

    import jaxhet

    if HIDE_GPUS in os.environ:
        _hide_gpus()
    if _is_in_job():
        jaxhet.initialize()
    elif world := os.environ.get(_WORLD):
        address, *numbers = world.split()
        num_processes, process, devices = map(int, numbers)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, process, range(devices))


def _is_in_job() -> bool:
    """Whether this process belongs to a job of islands rather than an ordinary JAX world."""
    return _config.resolve().process_id is not None


def _hide_gpus() -> None:
    """Hides the GPUs of other processes from this one, which sees its own first."""
    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    count = len(_config.resolve().local_device_ids or ())
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[:count])


def serve(answer: Callable[[Any], Any]) -> None:
    """Joins the job that started this process, answers requests until the owner's end, and leaves.

    Args:
      answer: Function of a request of `Job.ask`, whose result is the answer.
    """
    import jax

    import jaxhet

    join()
    with Client(sys.argv[1], "AF_UNIX") as connection:
        is_done = threading.Event()
        threading.Thread(target=_end_with, args=(connection, is_done), daemon=True).start()
        while (request := _next_request(connection)) is not None:
            connection.send(answer(request))
        is_done.set()
    if _is_in_job():
        jaxhet.shutdown()
    elif _WORLD in os.environ:
        jax.distributed.shutdown()


def _next_request(connection: Connection) -> Any:
    """The owner's next request. Without an owner this process ends at once, as its peers do."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        os._exit(1)


def _end_with(connection: Connection, is_done: threading.Event) -> None:
    """Ends this process when its owner is killed, even in the middle of an answer."""
    hang_up = select.poll()
    hang_up.register(connection, select.POLLRDHUP)
    hang_up.poll()
    if not is_done.is_set():
        os._exit(1)


def _command(worker: pathlib.Path | None) -> list[str]:
    return [sys.executable, *(("-m", "jaxhet.testing") if worker is None else (str(worker),))]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    return {**kept, "PYTHONPATH": import_path(), "JAX_PLATFORMS": "cpu", **(extra or {})}


if __name__ == "__main__":
    serve(lambda request: request[0](*request[1]))
