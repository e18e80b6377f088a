"""`jaxhet launch`: the processes of a job of several islands, watched from outside.

The launcher stays out of the job. It starts the coordinator (`jaxhet._job.coordinator_process`) and
the processes, each in a process group of its own; then one loop waits for output, for the end of a
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
from collections.abc import Callable

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._job import coordinator as _coordinator
from jaxhet._launch import environ as _environ
from jaxhet.cli import _guardian
from jaxhet.cli._lines import write
from jaxhet.cli._process import Process, ending, start_guardian

_HOST = "127.0.0.1"
DEFAULT_GRACE_S = 15.0
_TERM_TO_KILL_S = 5.0
_STRAGGLER_S = 1.0  # from SIGTERM to SIGKILL for processes that an ended one left in its group
_POLL_S = 0.05  # only while a group outlives its first process: no signal announces its end
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI foreground colours, by process


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet launch`; `jaxhet launch --help` explains each."""

    islands: int = 2
    processes_per_island: tuple[int, ...] = (1,)  # one number for all islands, or one for each
    devices: tuple[
        int, ...
    ] = ()  # per process; likewise; (): the program's, or a share of the GPUs
    port: int = 0
    grace_s: float | None = None  # None: `DEFAULT_GRACE_S`, but for processes that know
    island_names: tuple[str, ...] = ()
    island_env: tuple[tuple[str, str, str], ...] = ()  # island, variable, value
    join: bool = False  # programs join by themselves: JAXHET_AUTO=join


@dataclasses.dataclass(frozen=True)
class _Place:
    """Place of a process in the job.

    Attributes:
      island: Name of its island.
      env: The island's own variables.
      devices: Devices of the process; None: a share of the GPUs, or the program's CPU devices.
    """

    island: str
    env: dict[str, str]
    devices: int | None


def launch(command: list[str], options: Options) -> int:
    """Runs `command` as every process of a job; returns the exit code of the first failure, or 0.

    Only the main thread may call it: it handles signals while it runs.

    Raises:
      UsageError: the command does not exist, the port is in use, names or sizes are not one for
        each island, or there are too few GPUs.
    """
    places = _places(options)
    if shutil.which(command[0]) is None:
        raise UsageError(f"no command {command[0]!r}; name a program that exists after --")
    with contextlib.ExitStack() as stack:
        job = _Job(command, options, places, stack)
        job.wait()
        return job.summarize()


def island_names(options: Options) -> tuple[str, ...]:
    """The islands' names: those given, else island0, island1, …

    Raises:
      UsageError: there are more or fewer names than islands, or two are equal.
    """
    names = options.island_names or tuple(f"island{i}" for i in range(options.islands))
    if len(names) != options.islands or len(set(names)) != len(names):
        raise UsageError(
            f"--island-names {','.join(names)} does not name {options.islands} islands;"
            " give as many different names as --islands says"
        )
    return names


def _places(options: Options) -> list[_Place]:
    """The places of all processes, by process.

    Raises:
      UsageError: names or sizes are not one for each island, or a variable is for none.
    """
    names = island_names(options)
    envs = island_envs(options, names)
    processes = _per_island("--processes-per-island", options.processes_per_island, options)
    devices = _per_island("--devices", options.devices or (None,), options)
    return [
        _Place(name, envs[name], each)
        for name, count, each in zip(names, processes, devices, strict=True)
        for _ in range(count)
    ]


def island_envs(options: Options, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The variables of each island alone.

    Raises:
      UsageError: a variable is for an unknown island.
    """
    envs: dict[str, dict[str, str]] = {name: {} for name in names}
    for island, variable, value in options.island_env:
        if island not in envs:
            raise UsageError(
                f"--island-env {island}:{variable}={value} names no island of {', '.join(envs)}"
            )
        envs[island][variable] = value
    return envs


def _per_island[T](flag: str, numbers: tuple[T, ...], options: Options) -> tuple[T, ...]:
    if len(numbers) == 1:
        return numbers * options.islands
    if len(numbers) != options.islands:
        raise UsageError(
            f"{flag} {','.join(map(str, numbers))} does not fit {options.islands} islands; give one"
            " number for all, or as many as --islands says"
        )
    return numbers


def exit_event(process: int, text: str) -> bytes:
    """The line on the coordinator's stdin that says that a process has ended, and how."""
    return json.dumps({"process": process, "text": text}).encode() + b"\n"


def hold_port(port: int) -> socket.socket:
    """Binds a port (0: a free one) without listening, so that nobody else is given it meanwhile.

    Raises:
      UsageError: the port is in use.
    """
    sock = socket.socket(socket.AF_INET)
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
        places: list[_Place],
        stack: contextlib.ExitStack,
    ):
        """Starts the job; closing `stack` ends the processes that still run."""
        self._grace_s = DEFAULT_GRACE_S if options.grace_s is None else options.grace_s
        self._waits_for_knowing = options.grace_s is None
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._processes: list[Process] = []
        self._all: list[Process] = []  # and the coordinator
        self._unread: set[int] = set()  # our outputs whose reader has closed them
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._received: list[signal.Signals] = []  # not yet passed on
        self._passed_on: signal.Signals | None = None  # the first one
        self._first_failure: Process | None = None
        self._notes: list[str] = []
        self._start_s = time.monotonic()
        _handle_signals(self._selector, self._received, stack)
        self._held_port = stack.enter_context(hold_port(options.port))
        self._guardian_fd = start_guardian(stack)
        address = f"{_HOST}:{self._held_port.getsockname()[1]}"
        self._of_job = {
            "JAXHET_LAUNCHED": "1",
            "JAXHET_NUM_PROCESSES": str(len(places)),
            "JAXHET_ISLANDS": ",".join(dict.fromkeys(place.island for place in places)),
            "JAXHET_COORDINATOR_ADDRESS": address,
            "JAXHET_JOB_SECRET": secrets.token_hex(32),
            **({"JAXHET_AUTO": "join"} if options.join else {}),
        }
        base = {**os.environ, **self._of_job}
        stack.callback(self._kill_all)
        self._coordinator = self._start_coordinator(address, len(places), base)
        wanted = [place.devices for place in places]
        for number, place in enumerate(places):
            assigned = {
                **self._of_job,
                "JAXHET_PROCESS_ID": str(number),
                "JAXHET_ISLAND": place.island,
            }
            env = _environ.complete({**os.environ, **place.env}, assigned, wanted, number)
            label = f"process {number} ({place.island})"
            process = Process(label, command, env, self._guardian_fd, subprocess.DEVNULL)
            self._follow(number, place.island, process)

    def wait(self) -> None:
        """Returns when every process and all processes of its group have ended."""
        while not all(process.group_is_gone for process in self._processes):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._pass_signals_on()
            self._reap()
            self._fire_timers()

    def summarize(self) -> int:
        """Prints the summary of a failure on stderr; returns the launcher's exit code."""
        first = self._cause()
        if first is None:
            return 0
        lines = [
            f"jaxhet launch: failed first: {first.summary()}",
            *(f"  {p.summary()}" for p in self._processes if p is not first),
            *(f"  {note}" for note in self._notes),
        ]
        with contextlib.suppress(OSError):
            write(sys.stderr.fileno(), "\n".join([*lines, ""]).encode())
        code = first.returncode
        assert code is not None
        if first.stopped_by and self._passed_on:  # it did not heed the signal
            return 128 + self._passed_on
        return code if code > 0 else 128 - code

    def _cause(self) -> Process | None:
        """The process that failed first, by its peers' errors. It may exit later than they do."""
        first = self._first_failure
        if first is None or first.named is None or first.named >= len(self._processes):
            return first
        named = self._processes[first.named]
        return named if named.returncode and not named.stopped_by else first

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
        self._held_port.close()  # it listens

    def _follow(self, number: int, island: str, process: Process) -> None:
        """Shows the output of a process, and watches for its end."""
        self._all.append(process)
        self._processes.append(process)
        prefix = f"[{island}/{number}] "
        colour = f"\033[{_COLOURS[number % len(_COLOURS)]}m{prefix}\033[0m"
        for stream, output, remember in (
            (process.popen.stdout, sys.stdout, lambda line: line),
            (process.popen.stderr, sys.stderr, process.remember),
        ):
            coloured = output.isatty() and "NO_COLOR" not in os.environ
            emit = self._echo(output.fileno(), colour if coloured else prefix, remember)
            process.watch(self._selector, stream, emit)

    def _echo(
        self, fd: int, prefix: str, remember: Callable[[bytes], bytes | None]
    ) -> Callable[[bytes], None]:
        def emit(line: bytes) -> None:
            shown = remember(line)
            if shown is None or fd in self._unread:
                return
            try:
                write(fd, prefix.encode() + shown + b"\n")
            except BrokenPipeError:
                self._unread.add(fd)
                self._received.append(signal.SIGTERM)
            except OSError as error:  # a disk that is full: the job goes on without this line
                note = f"some of the output could not be written: {error.strerror}"
                if note not in self._notes:
                    self._notes.append(note)

        return emit

    def _timeout_s(self) -> float | None:
        if any(p.returncode is not None and not p.group_is_gone for p in self._processes):
            return _POLL_S
        if not self._timers:
            return None
        return max(0.0, min(when for when, _ in self._timers) - time.monotonic())

    def _pass_signals_on(self) -> None:
        while self._received:
            number = self._received.pop(0)
            self._notes.append(f"{number.name} was passed on to every process")
            for process in self._processes:
                process.signal_group(number)
            if self._passed_on is None:
                self._passed_on = number
                self._stop_after_grace()

    def _reap(self) -> None:
        ended = [p for p in self._processes if p.returncode is None and p.popen.poll() is not None]
        # A signal is a cause; an exit code that is seen at the same time may be its consequence.
        codes = [(process, code) for process in ended if (code := process.popen.poll()) is not None]
        for process, code in sorted(codes, key=lambda pair: pair[1] >= 0):
            self._on_end(process, code)
        for process in self._processes:
            if process.returncode is not None and not process.signal_group(0):
                self._on_group_gone(process)

    def _on_end(self, process: Process, returncode: int) -> None:
        process.returncode = returncode
        self._tell_coordinator(exit_event(self._processes.index(process), ending(returncode)))
        if returncode != 0 and self._first_failure is None:
            self._first_failure = process
            seconds = time.monotonic() - self._start_s
            self._notes.append(f"the first failure was {seconds:.1f} s after the start")
            if self._passed_on is None:
                self._stop_after_grace()
                self._after(DEFAULT_GRACE_S, self._tell_of_knowing)
        if process.signal_group(signal.SIGTERM):
            self._after(_STRAGGLER_S, lambda: self._stop(process, signal.SIGKILL))

    def _tell_coordinator(self, line: bytes) -> None:
        stdin = self._coordinator.popen.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ends by itself after the last goodbye
            write(stdin.fileno(), line)

    def _on_group_gone(self, process: Process) -> None:
        if not process.group_is_gone:
            process.group_is_gone = True
            process.close_outputs(self._selector)
            with contextlib.suppress(BrokenPipeError):  # somebody killed the guardian
                write(self._guardian_fd, _guardian.entry(-process.popen.pid))

    def _stop_after_grace(self) -> None:
        for number, delay_s in ((signal.SIGTERM, 0.0), (signal.SIGKILL, _TERM_TO_KILL_S)):
            self._after(self._grace_s + delay_s, lambda number=number: self._stop_running(number))

    def _stop_running(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.returncode is None and not self._is_left_alone(process):
                self._stop(process, number)

    def _is_left_alone(self, process: Process) -> bool:
        """Whether a process may end by itself, after its checkpoint or its exit hooks."""
        return process.knows_failure and self._waits_for_knowing and self._passed_on is None

    def _stop(self, process: Process, number: signal.Signals) -> None:
        if process.returncode is None:
            process.stopped_by = number
        process.signal_group(number)
        if process.returncode is not None:
            self._on_group_gone(process)  # but for zombies, where nobody reaps orphans

    def _tell_of_knowing(self) -> None:
        waits = [p for p in self._processes if p.returncode is None and self._is_left_alone(p)]
        if waits:
            names = ", ".join(process.label for process in waits)
            self._say(
                f"still waiting for {names}: the program there knows of the failure, and"
                " may be saving a checkpoint or running exit hooks; --grace SECONDS limits this"
                " wait, and SIGTERM or Ctrl-C ends it"
            )

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write(sys.stderr.fileno(), f"jaxhet launch: {text}\n".encode())

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + delay_s, action))

    def _fire_timers(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self._timers if timer[0] <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for _, action in due:
            action()

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
    """Wakes the selector at every signal, and adds signals for the processes to `received`."""
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
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            stack.callback(signal.signal, number, signal.signal(number, receive))
