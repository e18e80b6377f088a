"""Compiles random JAX programs with a vendor's real compiler, and says what each exchange moves.

`vendor_programs.py {cuda|rocm} FIRST COUNT` runs as a process of its own and prints a
line of JSON for each program: its seed, its plan, and for each exchange of the plan the origins of
the arrays in its operand. The origins come from names in the program, not from the plan.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, cast

import jax

from jaxhet import _config, _session
from jaxhet._islands import Island
from jaxhet._jax import compat
from jaxhet._pretended import deviceless
from jaxhet.compiler import Job, Options, hlo
from tests.python.compiler import moved, pipelined_schedule, worker
from tests.python.compiler.drawn_programs import NUM_DEVICES, Program, program
from tests.python.compiler.install_plugins import PLUGINS

# Less work behind our passes, which it does not change.
_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_llvm_disable_expensive_passes": True}


class Compiler(deviceless.Compiler):
    """A vendor's compiler that notes what each exchange moves.

    Attributes:
      moved: For each exchange, in the order of the plan, where the arrays in its operand come from.
      is_partitioned: Whether arrays are told by the operations that give them, not by name.
    """

    def __init__(self, vendor: deviceless.Vendor):
        super().__init__(vendor)
        self.moved: list[list[str]] = []
        self.is_partitioned = False
        _register_linear_algebra(vendor)

    def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
        if (result := super().decompose(module, job, options)) is not None:
            self.moved += moved.of_module(hlo.Module(result), not self.is_partitioned)
        return result

    def compile_program(self, program: Program) -> dict[str, Any]:
        devices, size = self.all_devices, program.island_size
        self.moved, self.is_partitioned = [], program.is_partitioned
        jax.clear_caches()
        lowered = program.lower(devices)
        islands = tuple(itertools.batched(devices, size))
        try:
            result = self.compile(lowered, islands, program.options, codegen=False)
        except jax.errors.JaxRuntimeError as error:
            if self._compiles_without_passes(lowered):
                raise
            return {"not_compiled": str(error)}
        if result is None:
            return {"fingerprint": 0, "lines": [], "moved": [], "pipelined": 0, "loops": []}
        exchanges = result[1].exchanges
        return {
            "fingerprint": result[1].fingerprint,
            "lines": [e.line for e in exchanges],
            "moved": self.moved,
            "pipelined": sum(e.is_pipelined for e in exchanges),
            "loops": pipelined_schedule.loops(hlo.Module(result[0])),
        }

    @functools.cached_property
    def all_devices(self) -> Sequence[Any]:
        return self.devices(2, NUM_DEVICES // 2)

    def _compiles_without_passes(self, lowered: Any) -> bool:
        self._job = None
        try:
            lowered.compile(compiler_options=deviceless._COMPILER_OPTIONS)
        except jax.errors.JaxRuntimeError:
            return False
        return True


def _register_linear_algebra(vendor: deviceless.Vendor) -> None:
    solver, blas, other = {
        "cuda": ("cusolver_", "cublas_", "cu_"),
        "rocm": ("hipsolver_", "hipblas_", "hip_"),
    }[vendor]
    names = [f"{solver}{name}_ffi" for name in _SOLVERS]
    names += [f"{blas}{name}_batched_ffi" for name in ("geqrf", "getrf", "trsm")]
    names += [f"{other}{name}" for name in ("threefry2x32_ffi", "lu_pivots_to_permutation")]
    for name in names:
        with contextlib.suppress(Exception):  # the plugin has it already
            compat.register_unused_handlers((name,), vendor.upper())


_SOLVERS = ("geqrf", "gesvd", "gesvdj", "gesvdp", "getrf", "orgqr", "potrf", "syevd", "sytrd")


def _install_session(vendor: Any, devices: Sequence[Any]) -> None:
    """Makes `jaxhet.per_platform` choose this vendor's functions."""
    ranks = tuple(range(len(devices)))
    island = Island("island0", 0, vendor, (0,), ("",), ranks, tuple(devices))
    session = _session.Session(_config.resolve(), 0, (island,), is_pretended=True)
    _session.install(session)


def main(vendor: deviceless.Vendor, first: int, count: int) -> None:
    sys.path.append(str(PLUGINS))
    deviceless._COMPILER_OPTIONS |= _COMPILER_OPTIONS
    compiler = Compiler(vendor)
    _install_session(vendor, compiler.all_devices)
    seeds = {str(seed): seed for seed in range(first, first + count)}
    worker.tell_each(seeds, lambda seed: compiler.compile_program(program(seed)))


if __name__ == "__main__":
    main(cast(deviceless.Vendor, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
