"""A real Slurm on this machine, with two nodes in two partitions, for one test.

Daemons (munged, slurmctld, a slurmd for each node) have all their files in one folder, listen on
127.0.0.1, and end with the `with` block. They need root, and Debian's packages of Slurm and Munge.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

from jaxhet.testing import free_port

PARTITIONS = {"nvidia": "nv0", "amd": "amd0"}  # partition -> its node
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
"""


def unavailable() -> str:
    """Why this machine can't run Slurm, or ""."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """The running daemons.

    Attributes:
      environ: Environment in which Slurm's commands find them.
    """

    def __init__(self, folder: pathlib.Path, base: Mapping[str, str]):
        self.folder = folder
        self.environ = {**base, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, timeout_s: float = 30) -> "subprocess.CompletedProcess[str]":
        """Runs a command of Slurm's and returns how it ended."""
        return subprocess.run(
            command,
            check=False,
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def logs(self) -> str:
        """The daemons' logs."""
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self.folder.glob("*.log"))


@contextlib.contextmanager
def running(folder: pathlib.Path, base: Mapping[str, str]) -> Iterator[Slurm]:
    """Starts the daemons, waits until both nodes are idle, and ends everything at the end.

    Args:
      folder: An empty folder for all files.
      base: Environment of the daemons, which jobs do not inherit.
    """
    _write_files(folder)
    slurm = Slurm(folder, base)
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> None:
            stack.enter_context(_daemon(command, slurm))

        start(*munged, f"--socket={folder}/munge.socket")
        _wait_for((folder / "munge.socket").exists, slurm)
        start("slurmctld", "-D", "-i")
        for node in PARTITIONS.values():
            start("slurmd", "-D", "-N", node)
        _wait_for(
            lambda: slurm.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * 2, slurm
        )
        yield slurm


def _write_files(folder: pathlib.Path) -> None:
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    host = socket.gethostname()
    lines = [_CONF.format(host=host, port=free_port(), folder=folder)]
    for node in PARTITIONS.values():
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1\n"
        )
    lines += [f"PartitionName={name} Nodes={node}\n" for name, node in PARTITIONS.items()]
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "state").mkdir()


@contextlib.contextmanager
def _daemon(command: tuple[str, ...], slurm: Slurm) -> Iterator[None]:
    with (slurm.folder / f"{command[0]}-{command[-1].rpartition('/')[2]}.out.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env=slurm.environ,
            cwd=slurm.folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(condition: Callable[[], bool], slurm: Slurm, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            state = slurm.run("sinfo", "--long", "--Node")
            raise AssertionError(f"{state.stdout}{state.stderr}\n{slurm.logs()}")
        time.sleep(0.2)
