"""Layouts and memory of arguments and results after a vendor's real compiler, with and without us.

A process of its own: `entry_layouts.py {cuda|rocm}` prints a line of JSON for each case: its name,
then what the compiled module says of its entry, and the number of exchanges.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import pxla
from jax._src.lib import hlo as hlo_lib  # pyright: ignore[reportAttributeAccessIssue]
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet._pretended import deviceless
from jaxhet.compiler import Job, Options
from tests.python.compiler import worker
from tests.python.compiler.install_plugins import PLUGINS

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
put = jax.device_put


class Case:
    """A function, with the layouts of its arguments and results as HLO writes them.

    Without devices JAX passes no layouts to the compiler, so the case does. `donate` has the
    numbers of donated arguments. Arrays are sharded along their first dimension.
    """

    def __init__(self, f: Callable[..., Any], args: str, results: str, donate: Any = ()):
        self.f, self.donate = f, donate
        self.args = [hlo_lib.Shape(text) for text in args.split()]
        shapes = [hlo_lib.Shape(text) for text in results.split()]
        self.ranks = [len(shape.dimensions()) for shape in shapes]
        self.result = hlo_lib.Shape.tuple_shape(shapes) if len(shapes) > 1 else shapes[0]

    def lower(self, mesh: Mesh) -> Any:
        split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        args = [jax.ShapeDtypeStruct(s.dimensions(), "float32", sharding=split) for s in self.args]
        results = [split if rank else whole for rank in self.ranks]
        out = tuple(results) if len(results) > 1 else results[0]
        jitted = jax.jit(self.f, out_shardings=out, donate_argnums=self.donate)
        return jitted.lower(*args)


def optimizer_step(w: jax.Array, moment: jax.Array, x: jax.Array) -> Any:
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    moment = 0.9 * put(moment, DEVICE) + 0.1 * gradient
    return w - moment, put(moment, HOST)


def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ put(w, DEVICE)), None), x, weights)[0].sum()


CASES = {
    "argument": Case(lambda x: put(x, DEVICE).sum(), "f32[8]{0:S(5)}", "f32[]"),
    "result": Case(lambda x: put(x * x.sum(), HOST), "f32[8]{0}", "f32[8]{0:S(5)}"),
    "scalar_result": Case(lambda x: put(x.sum(), HOST), "f32[8]{0}", "f32[]{:S(5)}"),
    "donated": Case(
        lambda x: put(put(x, DEVICE) * put(x, DEVICE).sum(), HOST),
        *("f32[8]{0:S(5)}", "f32[8]{0:S(5)}", 0),
    ),
    "inside_jit": Case(
        lambda x: put(put(x * x.sum(), HOST), DEVICE) + x.max(), "f32[8]{0}", "f32[8]{0}"
    ),
    "returned_unchanged": Case(
        lambda x, y: (y.sum(), x), "f32[8]{0:S(5)} f32[8]{0}", "f32[] f32[8]{0:S(5)}"
    ),
    "optimizer_step": Case(
        optimizer_step,
        "f32[8,8]{1,0} f32[8,8]{1,0:S(5)} f32[8,8]{1,0}",
        "f32[8,8]{1,0} f32[8,8]{1,0:S(5)}",
        (0, 1),
    ),
    "layers_of_a_loop": Case(
        lambda w, x: put(jax.grad(layers)(w, x), HOST),
        *("f32[4,8,8]{2,1,0:S(5)} f32[8,8]{1,0}", "f32[4,8,8]{2,1,0:S(5)}"),
    ),
    "columns_first": Case(
        lambda x, y: (x @ y, x * 2, y),
        "f32[8,8]{0,1} f32[8,8]{1,0}",
        "f32[8,8]{1,0} f32[8,8]{0,1} f32[8,8]{0,1}",
    ),
    "columns_first_in_host_memory": Case(
        lambda x: put(put(x, DEVICE) * 2 + put(x, DEVICE).sum(), HOST),
        *("f32[8,8]{0,1:S(5)}", "f32[8,8]{0,1:S(5)}"),
    ),
    "donated_without_alias": Case(
        lambda x, y: (x @ y).sum(0), "f32[8,8]{1,0} f32[8,8]{1,0}", "f32[8]{0}", (0, 1)
    ),
}


class Compiler(deviceless.Compiler):
    """A vendor's compiler, with the layouts of a case for arguments and results."""

    case: Case

    def options(self, make: Callable[..., Any], *args: Any) -> Any:
        options = make(*args)
        options.argument_layouts = self.case.args
        options.executable_build_options.result_layout = self.case.result
        return options

    def both(self, case: Case, devices: Any) -> Iterator[Any]:
        """The entry in the module, without our passes and with them; then the exchanges."""
        self.case = case
        lowered = case.lower(Mesh(np.array(devices), ("x",)))
        self._job = None
        yield _entry(lowered.compile(compiler_options=deviceless._COMPILER_OPTIONS))
        self._options, self._result, self._has_codegen = Options(), None, True
        self._job = Job(tuple(d.id for d in devices), (0, 1), self.vendor)
        jax.clear_caches()
        yield _entry(lowered.compile(compiler_options=deviceless._COMPILER_OPTIONS))
        yield len(self._result[1].exchanges) if self._result else 0


def _entry(compiled: Any) -> Any:
    executable = compiled.runtime_executable()
    header = executable.hlo_modules()[0].to_string().splitlines()[0]
    return executable.get_output_memory_kinds(), re.sub(r", frontend_attributes={.*?}", "", header)


def main(vendor: deviceless.Vendor) -> None:
    sys.path.append(str(PLUGINS))
    compiler, make = Compiler(vendor), pxla.create_compile_options
    pxla.create_compile_options = lambda *args: compiler.options(make, *args)
    pxla.are_all_shardings_default_mem_kind = lambda _: False  # JAX asks devices for their memory
    devices = compiler.devices(2, 1)
    worker.tell_each(CASES, lambda case: list(compiler.both(case, devices)))


if __name__ == "__main__":
    main(cast(deviceless.Vendor, sys.argv[1]))
