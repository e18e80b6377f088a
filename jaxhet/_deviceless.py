"""A vendor's real compiler with our passes in it, on a machine without the vendor's GPUs.

Programs are compiled for one kind of GPU of each vendor, and can't be run.
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal

from jaxhet import _jax_compat, _rocm_stubs
from jaxhet._errors import UsageError
from jaxhet._jax_compat import Device
from jaxhet.compiler import GPU_COMPILER_OPTIONS, Job, Options, Plan, bridge, decompose
from jaxhet.compiler.exchange import DONE_TARGET, START_TARGET

_HERE = pathlib.Path(__file__).parent
_COMPILER_OPTIONS = {**GPU_COMPILER_OPTIONS, "xla_gpu_autotune_level": 0}

Vendor = Literal["cuda", "rocm"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What stands for a vendor: its plugin's package, and a kind of GPU.

    Attributes:
      package: the suffix in the names of the plugin's Python packages.
      gpu: what target_configs/<vendor>.txtpb describes.
    """

    package: str
    gpu: str


TARGETS: dict[Vendor, Target] = {
    "cuda": Target("cuda13", "H100"),
    "rocm": Target("rocm7", "MI350X"),
}


class Compiler:
    """A vendor's compiler. One in a process: JAX keeps what it has loaded.

    Attributes:
      vendor: whose.
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
        self._error: Exception | None = None
        library = _find(vendor)
        if vendor == "rocm":
            _rocm_stubs.load(library)
        self._c_api = _jax_compat.load_compiler(
            vendor,
            library,
            f"jax_{TARGETS[vendor].package}_plugin.{vendor}_plugin_extension",
            (START_TARGET, DONE_TARGET),
            (self._pre, self._post),
        )

    def devices(self, islands: int, devices_per_island: int) -> list[Device]:
        """Devices to compile for, in the order of islands, each of which is one process."""
        return _jax_compat.compile_only_devices(
            self._c_api,
            self.vendor,
            (_HERE / "target_configs" / f"{self.vendor}.txtpb").read_text(),
            f"{islands}x1x{devices_per_island}",
        )

    def compile(
        self, lowered: Any, islands: tuple[tuple[Device, ...], ...], options: Options
    ) -> tuple[bytes, Plan] | None:
        """Compiles what was lowered for devices of `islands`.

        Returns:
          The scheduled module and its plan; None if no collective crosses islands.

        Raises:
          JaxhetError: a pass refuses the program.
        """
        ids = sorted((d.id, index) for index, island in enumerate(islands) for d in island)
        self._job = Job(tuple(i for i, _ in ids), tuple(index for _, index in ids), self.vendor)
        self._options, self._result, self._error = options, None, None
        try:
            lowered.compile(compiler_options=_COMPILER_OPTIONS)
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        return self._result

    def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
        """The PRE hook's work."""
        return decompose(module, job, options)

    def bridge(self, module: bytes, job: Job, options: Options) -> tuple[bytes, Plan] | None:
        """The POST hook's work."""
        return bridge(module, job, options)

    def _pre(self, module: bytes) -> bytes | None:
        return self._kept(self.decompose, module)

    def _post(self, module: bytes) -> bytes | None:
        bridged = self._kept(self.bridge, module)
        if bridged is None:
            return None
        self._result = bridged
        return bridged[0]

    def _kept(self, hook: Any, module: bytes) -> Any:
        """Runs a hook; of an error in it, JAX passes on the text only."""
        if self._job is None:
            return None
        try:
            return hook(module, self._job, self._options)
        except Exception as error:
            self._error = error
            raise


def _find(vendor: Vendor) -> pathlib.Path:
    """The vendor's plugin on Python's path; it is not imported: JAX would try to start it."""
    name = f"jax_plugins/xla_{TARGETS[vendor].package}/xla_{vendor}_plugin.so"
    for folder in sys.path:
        library = pathlib.Path(folder, name)
        if library.exists():
            return library
    raise UsageError(
        f"no compiler for {vendor}: there is no {name} on Python's path; install it with"
        " pip install 'jaxhet[deviceless]'"
    )
