"""Jobs for tests and benchmarks: islands, or an ordinary JAX world; on CPU unless `env` says more.

Their workers run what they are sent: every worker connects to a Unix socket of the owner (`serve`),
receives one request at a time and answers it.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from jaxhet._launch.gpus import Gpus
from tests.support.ports import free_port

ROOT = pathlib.Path(__file__).parents[2]
# For subprocesses: this tree, then what this process was given.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# LLVM's optimizations take a fifth of the time of tests that compile much; HLO is the same.
FAST_COMPILE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
_START_TIMEOUT_S = 180
HIDE_GPUS = "HIDE_OTHER_GPUS"  # set: a worker sees none but those that JAX takes there
_WORLD = "JOINED_WORLD"  # address, processes and id of a process of `joined_job`


@dataclasses.dataclass(frozen=True)
class Shape:
    """How many islands, processes in each, devices in each process.

    A tuple has a number for each island.
    """

    islands: int
    processes: int | tuple[int, ...] = 1
    devices: int | tuple[int, ...] = 1

    @property
    def devices_of_processes(self) -> tuple[int, ...]:
        sizes = zip(self._each(self.processes), self._each(self.devices), strict=True)
        return tuple(devices for processes, devices in sizes for _ in range(processes))

    @property
    def num_processes(self) -> int:
        return len(self.devices_of_processes)

    @property
    def num_devices(self) -> int:
        return sum(self.devices_of_processes)

    def _each(self, numbers: int | tuple[int, ...]) -> tuple[int, ...]:
        return (numbers,) * self.islands if isinstance(numbers, int) else numbers

    def __str__(self) -> str:
        return f"{self.islands}x{_text(self.processes, '+')}x{_text(self.devices, '+')}"


# Gives a running job, by its shape, or the number of devices of the one world, and **env.
Start = Callable[..., "Job"]


def _text(numbers: int | tuple[int, ...], separator: str) -> str:
    return str(numbers) if isinstance(numbers, int) else separator.join(map(str, numbers))


class Job:
    """The running workers of one job."""

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
        self.is_broken = False  # a worker ended or did not answer: of no more use
        self._workers = self._accept(num_workers)

    def ask(self, request: Any, timeout_s: float = 120) -> list[Any]:
        """Sends `request` to every worker; returns their answers."""
        try:
            for connection in self._workers:
                connection.send(request)
        except BrokenPipeError:
            self.is_broken = True
            raise AssertionError(f"a worker ended:\n{self.log.read_text()}") from None
        return [self._receive(connection, timeout_s) for connection in self._workers]

    def close(self) -> None:
        """Ends the job; one that does not end by itself is an error."""
        if self.is_broken:
            self._kill()
            self._listener.close()
            self._folder.cleanup()
            return
        for connection in self._workers:
            connection.send(None)
        try:
            codes = [process.wait(60) for process in self._processes]
        except subprocess.TimeoutExpired:
            self._kill()
            raise AssertionError(f"the job did not end:\n{self.log.read_text()}") from None
        finally:
            self._listener.close()
        assert not any(codes), f"the job ended with {codes}:\n{self.log.read_text()}"
        self._folder.cleanup()

    def _accept(self, num_workers: int) -> list[Connection]:
        self._listener._listener._socket.settimeout(_START_TIMEOUT_S)  # type: ignore[attr-defined]
        try:
            return [self._listener.accept() for _ in range(num_workers)]
        except TimeoutError:
            self._kill()
            raise AssertionError(f"the job did not start:\n{self.log.read_text()}") from None

    def _receive(self, connection: Connection, timeout_s: float) -> Any:
        try:
            if wait([connection], timeout_s):
                return connection.recv()
        except EOFError:
            self.is_broken = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(30)  # for the summary in the log
            raise AssertionError(f"a worker ended:\n{self.log.read_text()}") from None
        self.is_broken = True
        raise AssertionError(f"no answer within {timeout_s} s:\n{self.log.read_text()}")

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def island_job(shape: Shape, worker: pathlib.Path, env: Mapping[str, str] | None = None) -> Job:
    """A job of several islands, started by `jaxhet launch`."""
    launch = [sys.executable, "-m", "jaxhet.cli", "launch", "--islands", str(shape.islands)]
    processes, devices = _text(shape.processes, ","), _text(shape.devices, ",")
    sizes = ["--processes-per-island", processes, "--devices", devices]
    command = [*launch, *sizes, "--", sys.executable, str(worker)]
    return Job([(command, _environment(env))], shape.num_processes)


def world_job(num_devices: int, worker: pathlib.Path, env: Mapping[str, str] | None = None) -> Job:
    """An ordinary JAX world of one process."""
    devices = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    return Job([([sys.executable, str(worker)], _environment({**devices, **(env or {})}))], 1)


def joined_job(
    shape: Shape,
    worker: pathlib.Path,
    env: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
) -> Job:
    """An ordinary JAX world of several processes, joined by JAX's own Gloo, or NCCL on GPUs.

    `gpus` are dealt out to the processes in order, as many as each has devices.
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
        commands.append(([sys.executable, str(worker)], _environment({**world, **(env or {})})))
    return Job(commands, shape.num_processes)


def join() -> None:
    """In a worker: joins the job that started it."""
    import jax

    import jaxhet

    if HIDE_GPUS in os.environ:
        _hide_gpus()
    if "JAXHET_PROCESS_ID" in os.environ:
        jaxhet.initialize()
    elif world := os.environ.get(_WORLD):
        address, *numbers = world.split()
        num_processes, process, devices = map(int, numbers)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, process, range(devices))


def _hide_gpus() -> None:
    """Hides the GPUs of other processes from this one, which sees its own first."""
    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    count = len(os.environ["JAXHET_LOCAL_DEVICE_IDS"].split(","))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[:count])


def serve(answer: Callable[[Any], Any]) -> None:
    """In a worker: joins the job, answers requests until the owner sends None, and leaves."""
    import jax

    import jaxhet

    join()
    with Client(sys.argv[1], "AF_UNIX") as connection:
        while (request := connection.recv()) is not None:
            connection.send(answer(request))
    if "JAXHET_PROCESS_ID" in os.environ:
        jaxhet.shutdown()
    elif _WORLD in os.environ:
        jax.distributed.shutdown()


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAXHET_")}
    return {**kept, "PYTHONPATH": PYTHONPATH, "JAX_PLATFORMS": "cpu", **(extra or {})}
