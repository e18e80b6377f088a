"""Compiles programs for a pretended job: islands of a vendor's GPUs that are not there.

The compilers are the vendors' own, with our passes; their output can't run here. All of a
job's islands are of one vendor, and each is one process.
"""

import contextlib
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jaxhet import _compilation, _config, _plan, _session
from jaxhet._errors import UsageError
from jaxhet._islands import Island
from jaxhet._jax import compat, compiler_settings, programs
from jaxhet._jax.compat import Device
from jaxhet._jax.jaxlib import Vendor
from jaxhet._plan import PlanReport
from jaxhet._pretended import rocm_stubs
from jaxhet._traced import jaxprs
from jaxhet.compiler import (
    GPU_COMPILER_OPTIONS,
    PROGRAM_ATTRIBUTE,
    Job,
    Options,
    Plan,
    bridge,
    decompose,
)
from jaxhet.compiler.carrier import DEVICE_TARGETS, EXCHANGE_TARGET

_HERE = pathlib.Path(__file__).parent
_COMPILER_OPTIONS = {
    **GPU_COMPILER_OPTIONS,
    "optimization_level": 0,  # XLA's default, as in a job
    "xla_gpu_autotune_level": 0,
}


class _ScheduledError(Exception):
    """Ends a compilation when the scheduled module is known."""


class Compiler:
    """A vendor's compiler. One in a process: JAX keeps what it has loaded.

    Attributes:
      vendor: The vendor.
    """

    def __init__(self, vendor: Vendor):
        """Loads the compiler, before JAX has a backend.

        Raises:
          UsageError: it, or a tool that its stub libraries are built with, is not installed.
        """
        self.vendor: Vendor = vendor
        self._job: Job | None = None
        self._options = Options()
        self._result: tuple[bytes, Plan] | None = None
        self._is_used = False
        self._has_codegen = True
        compat.prepare_to_compile_only()
        programs.watch_lowering(
            jaxprs.labels, jaxprs.argument_labels, _digest_of, PROGRAM_ATTRIBUTE
        )
        if vendor == "cpu":
            return  # registrations create the client, which then has its devices
        library = _find(vendor)
        if vendor == "rocm":
            rocm_stubs.load(library)
        package = library.parent.name.removeprefix("xla_")  # for example cuda13
        extension = f"jax_{package}_plugin.{vendor}_plugin_extension"
        self._c_api = compat.load_compiler(vendor, library, extension, self._pre, self._post)
        compat.register_unused_handlers(DEVICE_TARGETS, vendor.upper())

    def devices(self, islands: int, devices_per_island: int) -> list[Device]:
        """Devices to compile for, in the order of islands. Call it once per compiler for CPUs."""
        if self.vendor == "cpu":
            devices = compat.cpu_devices(islands * devices_per_island)
            compat.register_unused_handlers((EXCHANGE_TARGET,), "cpu")
            compat.register_passes(self._pre, self._post, "cpu")
            return devices
        return compat.compile_only_devices(
            self._c_api,
            self.vendor,
            (_HERE / "target_configs" / f"{self.vendor}.txtpb").read_text(),
            f"{islands}x1x{devices_per_island}",
        )

    def compile(
        self,
        lowered: Any,
        islands: tuple[tuple[Device, ...], ...],
        options: Options,
        *,
        codegen: bool,
    ) -> tuple[bytes, Plan] | None:
        """Compiles a program that was lowered for devices of `islands`.

        Without `codegen` the compiler stops when the module is scheduled, if collectives cross
        islands: machine code takes half of the time.

        Returns:
          The scheduled module and its plan; None if no collective crosses islands.

        Raises:
          UsageError: it was lowered for other devices.
          JaxhetError: a pass refuses the program.
        """
        ids = sorted((d.id, index) for index, island in enumerate(islands) for d in island)
        self._job = Job(tuple(i for i, _ in ids), tuple(index for _, index in ids), self.vendor)
        self._options, self._result = options, None
        self._is_used, self._has_codegen = False, codegen
        with contextlib.suppress(_ScheduledError):
            lowered.compile(compiler_options=None if self.vendor == "cpu" else _COMPILER_OPTIONS)
        if not self._is_used:
            raise UsageError(
                "the program is not for the devices of the pretended job; make its mesh by"
                " jaxhet.make_mesh and give its arguments shardings over it"
            )
        return self._result

    def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
        """Replaces collectives that cross islands by exchanges."""
        return decompose(module, job, options)

    def bridge(self, module: bytes, job: Job) -> tuple[bytes, Plan] | None:
        """Replaces exchanges by calls of the engine."""
        return bridge(module, job)

    def _pre(self, module: bytes) -> bytes | None:
        if self._job is None:
            return None
        self._is_used = True
        return self.decompose(module, self._job, self._options)

    def _post(self, module: bytes) -> bytes | None:
        bridged = self.bridge(module, self._job) if self._job is not None else None
        if bridged is None:
            return None
        self._result = bridged
        if not self._has_codegen:
            raise _ScheduledError
        return bridged[0]


def pretend(
    vendor: Vendor, num_islands: int, devices_per_island: int
) -> Callable[[Any], PlanReport]:
    """Makes this process a member of a pretended job, as `make_mesh` and `islands` see it.

    Returns:
      A function that returns the exchanges of a lowered program. It raises JaxhetError if a pass
      refuses the program.

    Raises:
      UsageError: the vendor's compiler is not installed, or an option is not valid.
    """
    is_deterministic = compiler_settings.are_kernels_deterministic(compiler_settings.settings())
    config = _config.resolve().filled({"one_world_kernels": is_deterministic})
    compiler = Compiler(vendor)
    devices = sorted(compiler.devices(num_islands, devices_per_island), key=lambda d: d.id)
    islands = tuple(
        Island(
            name=f"island{index}",
            index=index,
            platform=vendor,
            processes=(index,),
            hosts=("",),
            ranks=tuple(range(index * devices_per_island, (index + 1) * devices_per_island)),
            devices=mine,
        )
        for index, mine in enumerate(itertools.batched(devices, devices_per_island))
    )
    _session.install(_session.Session(config, 0, islands, is_pretended=True))
    options = _compilation.compiler_options(config)

    def plan(lowered: Any) -> PlanReport:
        own = tuple(island.devices for island in islands)
        compiled = compiler.compile(lowered, own, options, codegen=False)
        return PlanReport(()) if compiled is None else _plan.of_module(compiled[0])

    return plan


def _digest_of(*program: Any) -> str:
    return jaxprs.describe(*program).digest


def _find(vendor: Vendor) -> pathlib.Path:
    """The vendor's plugin on Python's path; it is not imported: JAX would try to start it."""
    name = f"jax_plugins/xla_{vendor}*/xla_{vendor}_plugin.so"
    for folder in sys.path:
        if found := sorted(pathlib.Path(folder).glob(name)):
            return found[-1]  # the newest version of CUDA or ROCm
    raise UsageError(
        f"no compiler for {vendor}: there is no {name} on Python's path; install it with"
        " pip install -c constraints.txt -e '.[deviceless]' in the checkout"
    )
