"""The rungs of `benchmarks.ladder`, as data, and why one can't exist on a machine."""

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
from collections.abc import Mapping

from benchmarks.gpu_jobs import Setting
from benchmarks.training import Program
from jaxhet.testing import Job, Shape
from models.configs import CONFIGS
from tools.programs import softverbs

WORKER = pathlib.Path(__file__).with_name("train_worker.py")
# Mesh axes by the name of a program: outer one first; -1: all devices that are left.
PARALLEL = {"data": "data=-1", "fsdp": "fsdp=-1", "stage": "stage=2,data=-1"}
REFERENCE = "one_world"
_DEVICES: Mapping[str, str] = {"cpu": "CPUs", "cuda": "GPUs"}
_RDMA_NICS = pathlib.Path("/sys/class/infiniband")


@dataclasses.dataclass(frozen=True)
class Rung:
    """A way to run the programs.

    Attributes:
      text: Description in the table.
      transport: Transport that joins the islands; empty: one world, without jaxhet.
      is_split: Each device is an island of its own.
      is_alone: Each island trains by itself, on its share of the batch.
      platforms: On which the transport exists.
    """

    text: str
    transport: str = ""
    is_split: bool = False
    is_alone: bool = False
    platforms: tuple[str, ...] = ("cpu", "cuda")

    def shape(self, shape: Shape) -> Shape:
        """Shape of the rung's job, for islands of `shape`."""
        return Shape(shape.num_devices) if self.is_split else shape

    def variables(self, platform: str) -> dict[str, str]:
        """The environment of the rung's processes. May build the software libibverbs."""
        if not self.transport:
            return {}
        variables = {"JAXHET_TRANSPORTS": self.transport}
        if self.transport == "verbs" and not has_rdma_nic():
            variables |= softverbs("cuda" if platform == "cuda" else "")
            folders = (variables["LD_LIBRARY_PATH"], os.environ.get("LD_LIBRARY_PATH"))
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
        return variables

    def start(self, setting: Setting, num_jobs: int) -> Job:
        """The rung's job, which shares the devices' memory with the others of `num_jobs`."""
        variables = setting.variables(self.variables(setting.platform), num_jobs)
        return setting.start(self.shape(setting.shape), WORKER, variables)

    def program(self, program: Program, islands: int) -> Program:
        """The program of this rung. An island that runs alone has only its share of the rows."""
        batch = program.batch // islands if self.is_alone else program.batch
        return dataclasses.replace(program, batch=batch)

    def remark(self, setting: Setting) -> str:
        """Notes for a reader of the rung's figures; may be empty."""
        if self.is_alone:
            return f"1/{setting.shape.islands} of the batch on each island, no exchange"
        if self.transport == "verbs" and not has_rdma_nic():
            return "no RDMA NIC here: tests/softverbs, a libibverbs in software"
        if not self.transport:
            return "Gloo" if setting.platform == "cpu" else "NCCL"
        return ""


RUNGS: dict[str, Rung] = {
    "all_socket": Rung("every collective, staged `socket`", "socket", is_split=True),
    "socket": Rung("across islands only, staged `socket`", "socket"),
    "host": Rung("host memory (`host`; on CPUs `process_vm`)", "host,process_vm"),
    "verbs": Rung("RDMA over all NICs (`verbs`)", "verbs"),
    "device_direct": Rung("device-direct (`cuda_ipc`)", "cuda_ipc", platforms=("cuda",)),
    "alone": Rung("each island alone, sum", "socket", is_alone=True),
    REFERENCE: Rung("one world"),
}
DEFAULT = tuple(RUNGS)


def has_rdma_nic() -> bool:
    """Whether the kernel knows an RDMA NIC."""
    return _RDMA_NICS.is_dir() and any(_RDMA_NICS.iterdir())


def why_absent(rung: Rung, setting: Setting) -> str:
    """Why a rung can't exist on this machine and in this shape; empty if it can."""
    if setting.platform not in rung.platforms:
        devices = _DEVICES[setting.platform]
        return f"the transport {rung.transport} does not exist between islands of {devices}"
    if rung.is_split and setting.shape.num_devices == setting.shape.islands:
        return "each island has one device: the same as the rung socket"
    return _why_no_verbs() if rung.transport == "verbs" else ""


@functools.cache
def _why_no_verbs() -> str:
    if has_rdma_nic():
        return ""
    try:
        softverbs()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no RDMA NIC, and the software libibverbs of tests/softverbs was not built: {error}"
    return ""


def why_impossible(rung: Rung, program: Program, shape: Shape) -> str:
    """Why a rung can't run a program; empty if it can."""
    devices = shape.num_devices // (shape.islands if rung.is_alone else 1)
    where = "one island" if rung.is_alone else "the job"
    axes = program.axes
    fixed = math.prod(size for size in axes.values() if size > 0)
    if devices % fixed:
        return f"{where} has {devices} device(s); {program.mesh} needs a multiple of {fixed}"
    parts = devices // fixed
    if "stage" in axes:
        parts *= CONFIGS[program.config].microbatches
    batch = rung.program(program, shape.islands).batch
    if not batch or batch % parts:
        return f"{where} has {batch} rows; {program.mesh} needs a multiple of {parts}: give --rows"
    return ""
