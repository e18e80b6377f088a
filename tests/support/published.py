"""Programs that others published, run over islands and in plain JAX without any edit."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from jaxhet.testing import free_port
from tests.support.jobs import ROOT
from tests.support.scripts import environment

# `sh tools/setup.sh slow` fills it; a checkout of Equinox or JAX is put there by hand.
FOLDER = pathlib.Path(os.environ.get("PUBLISHED_PROGRAMS", ROOT / ".cache" / "programs"))
PACKAGES = FOLDER / "packages"  # imported by the programs
HERE = ROOT / "tests" / "multiprocess" / "published"
_FLOAT32 = 1  # DT_FLOAT in TensorFlow
_FIRST_PORT = 61440  # lowest port that JAX makes of Open MPI's job ids


def missing(*paths: str) -> str:
    """The reason why a test of these files is skipped, or an empty text."""
    absent = [path for path in paths if not list(FOLDER.glob(path))]
    if not absent:
        return ""
    return (
        f"no {', '.join(absent)} in {FOLDER}: `sh tools/setup.sh slow` installs packages and Flax's"
        " examples; checkouts of Equinox (equinox) and JAX (jax) are put there by hand"
    )


def find(path: str) -> pathlib.Path:
    """The one file or folder of this pattern."""
    (found,) = FOLDER.glob(path)
    return found


@dataclasses.dataclass(frozen=True)
class Run:
    """Shape and limits of a run.

    Attributes:
      devices: Devices of each process.
      processes: Processes of each island; plain JAX has twice as many in its one world.
      python: Interpreter of an environment that has the packages and jaxhet.
      folder: Folder in which the program runs.
      fails: Whether the program must fail.
      timeout_s: Limit in seconds.
    """

    devices: int
    processes: int = 1
    python: str = sys.executable
    folder: pathlib.Path | None = None
    fails: bool = False
    timeout_s: float = 900


def over_islands(command: Sequence[str], env: Mapping[str, str], run: Run) -> list[str]:
    """Output and errors of each process of two islands, by `jaxhet run`."""
    jaxhet = [run.python, "-m", "jaxhet.cli"]
    sizes = ["--processes-per-island", str(run.processes), "--devices", str(run.devices)]
    launch = [*jaxhet, "launch", "--islands", "2", *sizes, "--", *jaxhet, "run", "--"]
    with tempfile.TemporaryFile("w+") as log:
        try:
            ended = subprocess.run(
                [*launch, run.python, *command],
                env=_environment(env, run.python),
                cwd=run.folder,
                check=False,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=run.timeout_s,
            )
        except subprocess.TimeoutExpired:
            ended = None
        log.seek(0)
        text = log.read()
    assert ended, f"not done after {run.timeout_s} s:\n{text[-20_000:]}"
    assert bool(ended.returncode) == run.fails, text[-20_000:]
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"\[island\d+/(\d+)\] (.*)", line):
            lines.setdefault(found[1], []).append(found[2])
    return ["\n".join(lines[process]) for process in sorted(lines, key=int)]


def plain_world(processes: int, devices: int) -> list[dict[str, str]]:
    """Variables of processes that plain JAX takes for a world of Open MPI 4."""
    job = (_free_world_port() - _FIRST_PORT) << 12
    common = {
        "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_VERSION": "4.1.4",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    return [{**common, "OMPI_COMM_WORLD_RANK": str(process)} for process in range(processes)]


def in_plain_world(command: Sequence[str], env: Mapping[str, str], run: Run) -> list[str]:
    """Output of each process of a plain JAX world."""
    worlds = plain_world(2 * run.processes, run.devices)
    logs = [tempfile.TemporaryFile("w+") for _ in worlds]  # noqa: SIM115
    running = [
        subprocess.Popen(
            [run.python, *command],
            env=_environment({**world, **env}, run.python),
            cwd=run.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for world, log in zip(worlds, logs, strict=True)
    ]
    texts = []
    try:
        codes = [process.wait(run.timeout_s) for process in running]
    finally:
        for process, log in zip(running, logs, strict=True):
            process.kill()
            log.seek(0)
            texts.append(log.read())
            log.close()
    assert any(codes) == run.fails, texts[0][-20_000:]
    return texts


def outcomes_of_jax_tests(texts: Sequence[str]) -> dict[str, str]:
    """Outcome of each test that `jax_tests.py` ran, by file, class and name.

    A failure in one process is a failure of the test.
    """
    worst: dict[str, str] = {}
    for text in texts:
        for line in re.findall(r"^\{.*\}$", text, re.MULTILINE):
            for name, outcome in next(iter(json.loads(line).values())).items():
                if not worst.get(name, "").startswith("failed"):
                    worst[name] = outcome
    return worst


def scalars(folder: pathlib.Path) -> dict[str, list[float]]:
    """The float32 scalars that a program wrote for TensorBoard, by name."""
    found: dict[str, list[float]] = {}
    from tests.support.event_files import events  # needs tensorboardX

    for event in events(folder):
        for value in event.summary.value:
            tensor = value.tensor
            if tensor.dtype == _FLOAT32 and not tensor.tensor_shape.dim:
                number = tensor.float_val[0] if tensor.float_val else tensor.tensor_content
                if isinstance(number, bytes):
                    (number,) = struct.unpack("<f", number)
                found.setdefault(value.tag, []).append(number)
    return found


def make_data(folder: pathlib.Path) -> None:
    """Writes the data sets that the examples of Flax read."""
    subprocess.run(
        [sys.executable, str(HERE / "data.py"), str(folder)],
        env=_environment({}),
        check=True,
        capture_output=True,
        timeout=600,
    )


def _environment(env: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, PACKAGES))) if python == sys.executable else ""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    return {**environment(), **quiet, **env, "PYTHONPATH": path}


def _free_world_port() -> int:
    for port in range(_FIRST_PORT + free_port() % 4096, 65536):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)):
                return port
    return _free_world_port()
