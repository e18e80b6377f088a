"""`jaxhet launch`: the processes of a job of several islands on one machine, watched from outside.

The launcher stays out of the job. It starts the coordinator (`jaxhet._coordinator_process`) and the
processes, each in a process group of its own; then one loop waits for output, for the end of a
process and for signals. When a process ends, the coordinator is told, and tells the others.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from jaxhet import _config, _coordinator, _gpus
from jaxhet._errors import UsageError
from jaxhet.cli import _guardian
from jaxhet.cli._lines import write
from jaxhet.cli._process import Process, ending

_HOST = "127.0.0.1"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TERM_TO_KILL_S = 5.0
_STRAGGLER_S = 1.0  # from SIGTERM to SIGKILL for what an ended process left behind in its group
_DYING_S = 0.2  # from SIGKILL to the end of a process
_POLL_S = 0.05  # only while a group outlives its first process: no signal announces its end
# In a process's environment from its start: large buffers lie in huge pages, which are copied
# faster, out of a peer's memory above all. From glibc 2.35 on.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI foreground colours, by process


@dataclasses.dataclass(frozen=True)
class Options:
    """What `jaxhet launch` takes; `jaxhet launch --help` says what each means."""

    islands: int = 2
    processes_per_island: tuple[int, ...] = (1,)  # one number for all islands, or one for each
    devices: tuple[int, ...] = ()  # of each process; likewise; (): one CPU, or a share of the GPUs
    port: int = 0
    grace_s: float = 15.0
    island_names: tuple[str, ...] = ()
    island_env: tuple[tuple[str, str, str], ...] = ()  # island, variable, value


@dataclasses.dataclass(frozen=True)
class Place:
    """What tells the processes of a job apart.

    Attributes:
      island: its name.
      devices: how many.
      gpus: the environment variables that give the process its GPUs; None: its
        devices are virtual CPU devices.
      env: variables of its island alone.
    """

    island: str
    devices: int
    gpus: Mapping[str, str] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def launch(command: list[str], options: Options) -> int:
    """Runs `command` as every process of a job; returns the exit code of the first failure, or 0.

    Only the main thread may call it: it handles signals while it runs.

    Raises:
      UsageError: no such command, the port is in use, names or sizes that are not one for each
        island, or too few GPUs.
    """
    places = layout(options, _gpus.find(os.environ))
    if shutil.which(command[0]) is None:
        raise UsageError(f"no command {command[0]!r}; name a program that exists after --")
    with contextlib.ExitStack() as stack:
        job = _Job(command, options, places, stack)
        job.wait()
        return job.verdict()


def island_names(options: Options) -> tuple[str, ...]:
    """The islands' names: those given, else island0, island1, …

    Raises:
      UsageError: their number is not that of the islands, or two are equal.
    """
    names = options.island_names or tuple(f"island{i}" for i in range(options.islands))
    if len(names) != options.islands or len(set(names)) != len(names):
        raise UsageError(
            f"--island-names {','.join(names)} does not name {options.islands} islands;"
            " give as many different names as --islands says"
        )
    return names


def layout(options: Options, gpus: _gpus.Gpus | None = None) -> tuple[Place, ...]:
    """The places of the job's processes, by id; those of one island have neighbouring ids.

    Raises:
      UsageError: names or sizes are not one for each island, a variable is for an island that there
        is not, or there are too few GPUs.
    """
    processes = _per_island("--processes-per-island", options.processes_per_island, options)
    names = _for_each(island_names(options), processes)
    envs = _island_envs(options)
    wanted = _per_island("--devices", options.devices or (1,), options)
    devices = _for_each(wanted, processes)
    if gpus is None:
        return tuple(
            Place(name, count, env=envs[name]) for name, count in zip(names, devices, strict=True)
        )
    shares = _gpus.share(gpus, devices if options.devices else None, len(names))
    return tuple(
        Place(name, len(mine), gpus.environment(mine), envs[name])
        for name, mine in zip(names, shares, strict=True)
    )


def _island_envs(options: Options) -> dict[str, dict[str, str]]:
    """The variables of each island alone."""
    envs: dict[str, dict[str, str]] = {name: {} for name in island_names(options)}
    for island, variable, value in options.island_env:
        if island not in envs:
            raise UsageError(
                f"--island-env {island}:{variable}={value} names no island of {', '.join(envs)}"
            )
        envs[island][variable] = value
    return envs


def _for_each[T](values: tuple[T, ...], processes: tuple[int, ...]) -> list[T]:
    """The value of its island for each process."""
    return [value for value, n in zip(values, processes, strict=True) for _ in range(n)]


def _per_island(flag: str, numbers: tuple[int, ...], options: Options) -> tuple[int, ...]:
    if len(numbers) == 1:
        return numbers * options.islands
    if len(numbers) != options.islands:
        raise UsageError(
            f"{flag} {','.join(map(str, numbers))} does not fit {options.islands} islands; give one"
            " number for all, or as many as --islands says"
        )
    return numbers


def environment(process: int, places: tuple[Place, ...], base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one process: `base`, defaults below it, and what the launcher decides."""
    place = places[process]
    return {
        **({"JAX_PLATFORMS": "cpu", **_HUGE_PAGES} if place.gpus is None else {}),
        "PYTHONUNBUFFERED": "1",  # what a process printed before it was killed is shown
        **base,
        **place.env,
        "JAXHET_LAUNCHED": "1",
        "JAXHET_NUM_PROCESSES": str(len(places)),
        "JAXHET_PROCESS_ID": str(process),
        "JAXHET_ISLANDS": ",".join(dict.fromkeys(place.island for place in places)),
        "JAXHET_ISLAND": place.island,
        **({"JAXHET_CPU_DEVICES": str(place.devices)} if place.gpus is None else place.gpus),
    }


def exit_event(process: int, text: str) -> bytes:
    """The line on the coordinator's stdin that says that a process has ended, and how."""
    return json.dumps({"process": process, "text": text}).encode() + b"\n"


def hold_port(port: int) -> socket.socket:
    """Binds a port (0: a free one) without listening, so that nobody else is given it meanwhile.

    Raises:
      UsageError: the port is in use.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the coordinator binds it as well
    try:
        sock.bind((_HOST, port))
    except OSError as error:
        sock.close()
        raise UsageError(
            f"port {port} cannot be bound ({error.strerror}); choose another one with --port, or"
            " leave it out for a free one"
        ) from None
    return sock


class _Job:
    """The running job. One thread, and one selector that waits for pipes and for signals."""

    def __init__(
        self,
        command: list[str],
        options: Options,
        places: tuple[Place, ...],
        stack: contextlib.ExitStack,
    ):
        """Starts the job; closing `stack` ends whatever of it is left."""
        self._grace_s = options.grace_s
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._processes: list[Process] = []
        self._all: list[Process] = []  # and the coordinator
        self._unread: set[int] = set()  # outputs of ours that nobody reads any more
        self._stopping = False
        self._timers: list[tuple[float, signal.Signals, Process]] = []
        self._received: list[signal.Signals] = []  # not yet passed on
        self._first_failure: Process | None = None
        self._notes: list[str] = []
        self._start_s = time.monotonic()
        _handle_signals(self._selector, self._received, stack)
        self._held_port = stack.enter_context(hold_port(options.port))
        self._guardian_fd = _start_guardian(stack)
        address = f"{_HOST}:{self._held_port.getsockname()[1]}"
        base = {
            **os.environ,
            "JAXHET_COORDINATOR_ADDRESS": address,
            "JAXHET_JOB_SECRET": secrets.token_hex(32),
        }
        stack.callback(self._kill_all)
        self._coordinator = self._start_coordinator(address, len(places), base)
        for process in range(len(places)):
            self._start_process(process, command, environment(process, places, base))

    def wait(self) -> None:
        """Returns when every process and what it left behind has ended."""
        while not all(process.group_is_gone for process in self._processes):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._pass_signals_on()
            self._reap()
            self._fire_timers()

    def verdict(self) -> int:
        """Tells the story of a failure on stderr; returns the launcher's exit code."""
        if self._first_failure is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have been killed just now
            self._coordinator.popen.wait(_DYING_S)
        if coordinator := self._coordinator.popen.returncode:
            self._notes.append(f"coordinator: {ending(coordinator)}")
        lines = [
            f"jaxhet launch: failed first: {self._first_failure.story()}",
            *(f"  {p.story()}" for p in self._processes if p is not self._first_failure),
            *(f"  {note}" for note in self._notes),
        ]
        with contextlib.suppress(BrokenPipeError):
            write(sys.stderr.fileno(), "\n".join([*lines, ""]).encode())
        code = self._first_failure.popen.returncode
        return code if code > 0 else 128 - code

    def _start_coordinator(self, address: str, num_processes: int, env: dict[str, str]) -> Process:
        timeout_s = _config.resolve(environ=env).connect_timeout_s
        process = Process(
            "coordinator",
            _coordinator.command(address, num_processes, timeout_s),
            {**env, **_coordinator.QUIET},
            self._guardian_fd,
            subprocess.PIPE,
        )
        self._all.append(process)
        process.watch(self._selector, process.popen.stdout, self._on_coordinator_line)
        process.watch(
            self._selector,
            process.popen.stderr,
            self._echo(sys.stderr.fileno(), "[coordinator] ", process.remember),
        )
        return process

    def _on_coordinator_line(self, line: bytes) -> None:
        word, _, text = line.decode(errors="replace").partition(" ")
        if word == "error":
            raise UsageError(text)
        self._held_port.close()  # it says that it listens

    def _start_process(self, number: int, command: list[str], env: dict[str, str]) -> None:
        island = env["JAXHET_ISLAND"]
        process = Process(
            f"process {number} ({island})", command, env, self._guardian_fd, subprocess.DEVNULL
        )
        self._all.append(process)
        self._processes.append(process)
        prefix = f"[{island}/{number}] "
        colour = f"\033[{_COLOURS[number % len(_COLOURS)]}m{prefix}\033[0m"
        for stream, output, remember in (
            (process.popen.stdout, sys.stdout, lambda line: None),
            (process.popen.stderr, sys.stderr, process.remember),
        ):
            coloured = output.isatty() and "NO_COLOR" not in os.environ
            emit = self._echo(output.fileno(), colour if coloured else prefix, remember)
            process.watch(self._selector, stream, emit)

    def _echo(
        self, fd: int, prefix: str, remember: Callable[[bytes], None]
    ) -> Callable[[bytes], None]:
        def emit(line: bytes) -> None:
            remember(line)
            if fd in self._unread:
                return
            try:
                write(fd, prefix.encode() + line + b"\n")
            except BrokenPipeError:
                self._unread.add(fd)
                self._received.append(signal.SIGTERM)

        return emit

    def _timeout_s(self) -> float | None:
        if any(p.returncode is not None and not p.group_is_gone for p in self._processes):
            return _POLL_S
        if not self._timers:
            return None
        return max(0.0, min(when for when, _, _ in self._timers) - time.monotonic())

    def _pass_signals_on(self) -> None:
        while self._received:
            number = self._received.pop(0)
            self._notes.append(f"{number.name} was passed on to every process")
            for process in self._processes:
                process.signal_group(number)
            self._stop_all()

    def _reap(self) -> None:
        ended = [p for p in self._processes if p.returncode is None and p.popen.poll() is not None]
        # A signal is a cause; an exit code that is seen at the same time may be its consequence.
        for process in sorted(ended, key=lambda p: p.popen.returncode >= 0):
            self._on_end(process, process.popen.returncode)
        for process in self._processes:
            if process.returncode is not None and not process.signal_group(0):
                self._on_group_gone(process)

    def _on_end(self, process: Process, returncode: int) -> None:
        process.returncode = returncode
        self._tell_coordinator(exit_event(self._processes.index(process), ending(returncode)))
        if returncode != 0 and self._first_failure is None:
            self._first_failure = process
            seconds = time.monotonic() - self._start_s
            self._notes.append(f"the first failure came {seconds:.1f} s after the start")
            self._stop_all()
        if process.signal_group(signal.SIGTERM):
            self._timers.append((time.monotonic() + _STRAGGLER_S, signal.SIGKILL, process))

    def _tell_coordinator(self, line: bytes) -> None:
        stdin = self._coordinator.popen.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ends by itself after the last goodbye
            write(stdin.fileno(), line)

    def _on_group_gone(self, process: Process) -> None:
        if not process.group_is_gone:
            process.group_is_gone = True
            process.close_outputs(self._selector)
            write(self._guardian_fd, _guardian.entry(-process.popen.pid))

    def _stop_all(self) -> None:
        """Gives what still runs the grace time; a second call does not prolong it."""
        if self._stopping:
            return
        self._stopping = True
        term_s = time.monotonic() + self._grace_s
        for process in self._processes:
            if process.returncode is None:
                self._timers.append((term_s, signal.SIGTERM, process))
                self._timers.append((term_s + _TERM_TO_KILL_S, signal.SIGKILL, process))

    def _fire_timers(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self._timers if timer[0] <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for _, number, process in due:
            if process.returncode is None:
                process.stopped_by = number
            process.signal_group(number)
            if process.returncode is not None:
                self._on_group_gone(process)  # but for zombies, where nobody reaps orphans

    def _kill_all(self) -> None:
        for process in self._all:
            process.signal_group(signal.SIGKILL)
            process.popen.wait()
            process.close_outputs(self._selector)
            if process.popen.stdin:
                process.popen.stdin.close()


def _handle_signals(
    selector: selectors.BaseSelector, received: list[signal.Signals], stack: contextlib.ExitStack
) -> None:
    """Wakes the selector at every signal and puts those to pass on into `received`."""
    wake, written = socket.socketpair()
    for sock in (wake, written):
        sock.setblocking(False)
        stack.enter_context(sock)
    selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written.fileno()))

    def receive(number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            received.append(signal.Signals(number))

    for number in (signal.SIGCHLD, *_PASSED_ON):
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            stack.callback(signal.signal, number, signal.signal(number, receive))


def _start_guardian(stack: contextlib.ExitStack) -> int:
    """Starts the guardian; returns the pipe to it, whose end is the guardian's."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", _guardian.__file__],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    stack.callback(guardian.wait)
    stack.enter_context(guardian.stdin)
    return guardian.stdin.fileno()
