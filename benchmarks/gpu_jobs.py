"""The systems that the benchmarks on GPUs compare: jobs that live side by side and take turns.

`cuda_ipc`, `host` and `socket` are two islands joined by that transport (`host` is `process_vm`
between CPUs), and in `cuda_ipc_hidden` each process sees its own GPUs only, not all of the host's;
in those that end in `_unpipelined` loops are not pipelined, and in those that end in `_mxint8`
exchanges have that codec (training only). `nccl` is the same processes and devices as one world,
`nccl_overlap` the same with XLA's latency-hiding scheduler, and `nccl_sockets` with NCCL kept from
everything but sockets. On CPU (`--platform cpu`, to try a benchmark out) JAX's own Gloo takes
NCCL's place.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import gpus
from jaxhet.testing import HIDE_GPUS, Job, Shape, island_job, joined_job

# Part of a GPU's memory for all systems together; contexts and NCCL's buffers get the rest.
_MEMORY_FRACTION = 0.9
COMPILE_TIMEOUT_S, _TIMEOUT_S = 600, 180  # longest wait for an answer with and without compilation
_DEADLINE_S = 60  # an exchange's: a benchmark must not wait for long
_LAST_LINES = 30  # shown of a failed system's output

_TRANSPORTS = "JAXHET_TRANSPORTS"  # systems of islands set it, one world does not

SYSTEMS: dict[str, dict[str, str]] = {
    "cuda_ipc": {_TRANSPORTS: "cuda_ipc"},
    "cuda_ipc_hidden": {_TRANSPORTS: "cuda_ipc", HIDE_GPUS: "1"},
    "host": {_TRANSPORTS: "host,process_vm"},
    "socket": {_TRANSPORTS: "socket"},
    "cuda_ipc_unpipelined": {_TRANSPORTS: "cuda_ipc", "JAXHET__PIPELINE_ITERATIONS": "0"},
    "socket_unpipelined": {_TRANSPORTS: "socket", "JAXHET__PIPELINE_ITERATIONS": "0"},
    "cuda_ipc_mxint8": {_TRANSPORTS: "cuda_ipc", "JAXHET_WIRE": "mxint8"},
    "socket_mxint8": {_TRANSPORTS: "socket", "JAXHET_WIRE": "mxint8"},
    "nccl": {},
    "nccl_overlap": {},
    "nccl_sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
# Flags of XLA that belong to a system, on GPU.
_FLAGS = {"nccl_overlap": "--xla_gpu_enable_latency_hiding_scheduler=true"}
# Without autotuning, whose choices differ from compilation to compilation, all systems have the
# same kernels.
SAME_KERNELS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The common settings of all systems of a run."""

    platform: str
    shape: Shape
    xla_flags: str = ""

    def environment(self, system: str, num_systems: int) -> dict[str, str]:
        """The environment of a system's processes, except the place in their job."""
        flags = _FLAGS.get(system, "") if self.platform == "cuda" else ""
        return self.variables(SYSTEMS[system], num_systems, flags)

    def variables(
        self, own: Mapping[str, str], num_systems: int, xla_flags: str = ""
    ) -> dict[str, str]:
        """Adds the variables and XLA flags of all systems to a system's own ones."""
        flags = [self.xla_flags, os.environ.get("XLA_FLAGS", ""), xla_flags]
        return {
            "JAX_PLATFORMS": self.platform,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_MEMORY_FRACTION / num_systems:.3f}",
            "XLA_FLAGS": " ".join(filter(None, flags)),
            **({"JAXHET_DEADLINE_S": str(_DEADLINE_S)} if _TRANSPORTS in own else {}),
            **own,
        }

    def start(self, shape: Shape, worker: pathlib.Path, variables: Mapping[str, str]) -> Job:
        """A job of that shape: islands if `variables` name transports, else one world."""
        if _TRANSPORTS in variables:
            return island_job(shape, worker, variables)
        names = gpus.visible()[0] if self.platform == "cuda" else ()
        return joined_job(shape, worker, variables, names)


def is_bridged(system: str) -> bool:
    """Whether the system is two islands."""
    return _TRANSPORTS in SYSTEMS[system]


def add_options(
    parser: argparse.ArgumentParser, systems: Sequence[str], shape: str, xla_flags: str = ""
) -> None:
    """Adds `--platform`, `--systems`, `--shape`, `--xla-flags` and `--json`, with defaults."""
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--systems", type=names_of(SYSTEMS), default=list(systems))
    parser.add_argument(
        "--shape", default=shape, help="islands x processes of each x devices of each process"
    )
    parser.add_argument("--xla-flags", default=xla_flags, help="XLA_FLAGS of all systems, on GPU")
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")


def names_of(valid: Mapping[str, Any] | Sequence[str]) -> Any:
    """For `type=` of an option: names of `valid`, with commas."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(valid):
            raise argparse.ArgumentTypeError(f"{text!r}: choose of {', '.join(valid)}")
        return chosen

    return names


def setting(args: argparse.Namespace) -> Setting:
    """The settings of `add_options`; exits with a line if there are too few GPUs."""
    shape = Shape(*map(int, args.shape.split("x")))
    if args.platform == "cuda" and (reason := gpus.why_fewer_than(shape.num_devices)):
        raise SystemExit(f"{reason}; --platform cpu tries the benchmark out without GPUs")
    return Setting(args.platform, shape, args.xla_flags if args.platform == "cuda" else "")


class Systems:
    """Running jobs. A system that fails is left out from then on, and what it said is kept.

    Attributes:
      alive: the job of each system that has not failed.
      failures: last message of each system that has failed.
    """

    def __init__(self) -> None:
        self.alive: dict[str, Job] = {}
        self.failures: dict[str, str] = {}

    @property
    def bridged(self) -> list[str]:
        """The systems that are two islands."""
        return [system for system in self.alive if is_bridged(system)]

    def attempt(self, system: str, action: Callable[[], Any]) -> Any:
        """The result of `action`; None if the system fails in it."""
        try:
            return action()
        except AssertionError as error:
            self.alive.pop(system, None)
            self.failures[system] = str(error)
            text = "\n".join(str(error).splitlines()[-_LAST_LINES:])
            print(f"{system} failed and is left out:\n{text}", file=sys.stderr, flush=True)

    def ask(self, system: str, request: Any, timeout_s: float = _TIMEOUT_S) -> list[Any] | None:
        """The answers of a system's processes; None if it fails, or has failed."""
        job = self.alive.get(system)
        return self.attempt(system, lambda: job.ask(request, timeout_s)) if job else None

    def ask_all(
        self,
        request: Callable[[str], Any],
        timeout_s: float = COMPILE_TIMEOUT_S,
        names: Sequence[str] | None = None,
    ) -> dict[str, list[Any]]:
        """Sends each system (or each of `names`) its request, all at the same time.

        Returns:
          The answers of the systems that are alive.
        """
        chosen = [*self.alive] if names is None else names
        with ThreadPoolExecutor() as pool:
            asked = {s: pool.submit(self.ask, s, request(s), timeout_s) for s in chosen}
            answers = {system: answer.result() for system, answer in asked.items()}
        return {system: answer for system, answer in answers.items() if answer is not None}

    def facts(self, request: Any) -> dict[str, Any]:
        """Hardware and software, as the first answering process reports them."""
        for system in [*self.alive]:
            if answers := self.ask(system, request):
                return answers[0]
        raise SystemExit("no system could be started")


@contextlib.contextmanager
def running(systems: Sequence[str], setting: Setting, worker: pathlib.Path) -> Iterator[Systems]:
    """The systems, started at the same time; all that is left of them is closed at the end."""

    def start(system: str) -> Job:
        variables = setting.environment(system, len(systems))
        return setting.start(setting.shape, worker, variables)

    with started({system: functools.partial(start, system) for system in systems}) as alive:
        yield alive


@contextlib.contextmanager
def started(starts: Mapping[str, Callable[[], Job]]) -> Iterator[Systems]:
    """Jobs by the name of their system, started at the same time, and closed at the end."""
    all_of_them = Systems()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        jobs = {system: pool.submit(start) for system, start in starts.items()}
        for system, job in jobs.items():
            if running_job := all_of_them.attempt(system, job.result):
                all_of_them.alive[system] = running_job
                stack.callback(all_of_them.attempt, system, running_job.close)
        yield all_of_them


def exit_code(num_missed: int, systems: Systems) -> int:
    """Prints the last line; returns the exit code: 1 if a bar is missed or a system has failed."""
    failed = ", ".join(systems.failures)
    parts = [f"{num_missed} bars MISSED"] if num_missed else []
    parts += [f"FAILED, and not measured: {failed}"] if failed else []
    print("; ".join(parts) or "all bars reached")
    return int(bool(parts))
