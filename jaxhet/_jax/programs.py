"""How JAX lowers, compiles and launches programs; uses JAX's internals, as `_jax/compat.py` does.

tests/python/test_jax_programs.py tests the parts of JAX that these functions rely on.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxhet._jax import compat
from jaxhet._jax.replacements import install


def watch_lowering(
    labels: Callable[[Any], list[str]],
    argument_labels: Callable[[Any], list[str]],
    describe: Callable[[str, Any, Sequence[Any], Callable[[Any], str]], str],
    attribute: str,
) -> None:
    """Numbers the equations of every program that is lowered, and marks its module.

    An equation's label becomes a part of its name stack, which XLA copies into the `op_name` of
    each instruction of the equation.

    Args:
      labels: Gets a jaxpr; gives a label for each of its equations.
      argument_labels: Gets a jaxpr; gives the end of a name for each of its operands.
      describe: Gets name, jaxpr, the shardings of arguments and results with the ids of the
        devices, and a function that gives the source line of an equation; gives the mark. Asked for
        programs of several devices only.
      attribute: The frontend attribute of the module that holds the mark. Another one, with
        `_meshes` behind its name, holds the program's meshes (`jaxhet/compiler/axes.py`).
    """
    from jax._src import source_info_util
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    source_info_util.register_exclusion(f"{pathlib.Path(__file__).parents[1]}/")

    @install("jax._src.interpreters.mlir:jaxpr_subcomp")
    def numbered(lower: Any, ctx: Any, jaxpr: Any, name_stack: Any, *args: Any, **kw: Any) -> Any:
        eqns = [
            eqn.replace(
                source_info=eqn.source_info.replace(
                    name_stack=eqn.source_info.name_stack.extend(label)
                )
            )
            for eqn, label in zip(jaxpr.eqns, labels(jaxpr), strict=True)
        ]
        return lower(ctx, jaxpr.replace(eqns=eqns), name_stack, *args, **kw)

    def location(eqn: Any) -> str:
        frame = source_info_util.user_frame(eqn.source_info.traceback)
        if frame is None:
            return ""
        return f"{'/'.join(pathlib.PurePath(frame.file_name).parts[-2:])}:{frame.start_line}"

    @install("jax._src.interpreters.mlir:lower_jaxpr_to_module")
    def marked(lower: Any, name: str, jaxpr: Any, **kwargs: Any) -> Any:
        if names := kwargs.get("arg_names"):
            ends = argument_labels(jaxpr)
            added = [""] * (len(names) - len(ends)) + ends  # constants come before the arguments
            pairs = zip(names, added, strict=True)
            kwargs["arg_names"] = [f"{n}/{end}" if n and end else n for n, end in pairs]
        result = lower(name, jaxpr, **kwargs)
        if kwargs.get("num_partitions", 1) > 1:
            shardings = [kwargs.get("arg_shardings"), kwargs.get("result_shardings")]
            ids = [device.id for device in _devices_of(kwargs.get("axis_context"))]
            mark = describe(name, jaxpr, [*shardings, ids], location)
            with result.module.context:
                attributes = {**frontend_attributes(result.module)}
                attributes[attribute] = ir.StringAttr.get(mark)
                if meshes := _meshes(result.module):
                    attributes[f"{attribute}_meshes"] = ir.StringAttr.get(json.dumps(meshes))
                own = result.module.operation.attributes
                own["mhlo.frontend_attributes"] = ir.DictAttr.get(attributes)
        return result


def _meshes(module: Any) -> list[tuple[list[tuple[str, int]], list[int]]]:
    """The meshes of a lowered program: axes with their sizes, and the order of devices if given."""
    from jax._src.lib.mlir.dialects import sdy  # pyright: ignore[reportPrivateImportUsage]

    found: list[tuple[list[tuple[str, int]], list[int]]] = []
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.operation.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            found.append(([(a.name, a.size) for a in axes], list(mesh.device_ids)))
    return [(axes, ids) for axes, ids in found if axes]


def _devices_of(context: Any) -> Sequence[Any]:
    """The devices of a program that is lowered, in the order of its partitions."""
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return list(mesh.devices.flat)
    return getattr(context, "device_assignment", None) or ()


def watch_callbacks(failed: Callable[[frozenset[int], BaseException], None]) -> None:
    """Reports callbacks that raise while other devices wait for their result.

    XLA's partitioner runs a callback on one device, and broadcasts the result. In a `shard_map`
    each device runs it for itself.

    Args:
      failed: Gets the ids of the program's devices, and the error.
    """

    @install("jax._src.callback:emit_python_callback")
    def emit(original: Any, ctx: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        # The assignment is None in a `shard_map`, which has another kind of context.
        devices = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
        ids = frozenset(device.id for device in devices)

        def watched(*values: Any) -> Any:
            try:
                return callback(*values)
            except BaseException as error:
                failed(ids, error)
                raise

        return original(ctx, watched if ctx.avals_out else callback, *args, **kwargs)


def guard_launches(
    attribute: str,
    is_guarded: Callable[[str], bool],
    check: Callable[[str], None],
    accept: Callable[[bytes], bool],
) -> None:
    """Calls `check` before a thread that has not called `own_launches` launches a guarded program.

    JAX launches most calls in C++. Its key of a program contains a context of the calling thread.
    Calls by threads with another context run in Python, and are checked there.

    Args:
      attribute: The frontend attribute of a module that names its program.
      is_guarded: Whether a compiled program of this name is guarded.
      check: Gets the name of a function; raises if this thread must not launch it.
      accept: Gets the compiled module of a serialized executable, and returns whether it is
        guarded; raises if it can't be used.
    """
    guarded: set[int] = set()  # by identity: an executable lives as long as what launches it

    def note(executable: Any, is_one: bool) -> None:
        (guarded.add if is_one else guarded.discard)(id(executable))

    @install("jax._src.compiler:compile_or_get_cached")
    def compiled(compile: Any, backend: Any, computation: Any, *args: Any, **kwargs: Any) -> Any:
        executable = compile(backend, computation, *args, **kwargs)
        name = frontend_attributes(computation).get(attribute)
        note(executable, name is not None and is_guarded(name.value))
        return executable

    @install("jax.experimental.serialize_executable:_JaxPjrtUnpickler.persistent_load")
    def loaded(load: Any, self: Any, pid: Any) -> Any:
        result = load(self, pid)
        if pid[0] == "exec":
            accepted = [accept(module) for module in compat.serialized_modules(result)]
            note(result, any(accepted))
        return result

    @install("jax._src.interpreters.pxla:ExecuteReplicated.__call__")
    def checked(launch: Any, self: Any, *args: Any) -> Any:
        if id(self.xla_executable) in guarded:
            check(self.name)
        return launch(self, *args)

    @install("jax._src.pjit:_get_fastpath_data")
    def checked_fast_path(fast_path: Any, executable: Any, *args: Any, **kwargs: Any) -> Any:
        known = getattr(executable, "xla_executable", None)
        if id(known) in guarded and _launch_context().value is None:
            return None
        return fast_path(executable, *args, **kwargs)


def add_compiler_options(
    options: Callable[[frozenset[int]], Mapping[str, bool | int] | None],
) -> None:
    """Adds XLA's options to later compilations; options that a call itself gives win.

    Above its default optimization level, XLA copies loops, and the exchanges in them. So the level
    of such a compilation is the default.

    Args:
      options: Returns the options by name, for the ids of a program's devices; None for a program
        to compile as without jaxhet.
    """

    @install("jax._src.compiler:compile_or_get_cached")
    def compiled(
        compile: Any, backend: Any, module: Any, devices: Any, compile_options: Any, *args: Any
    ) -> Any:
        more = options(frozenset(device.id for device in devices.flat))
        if more is not None:
            given = list(compile_options.env_option_overrides)
            names = {name for name, _ in given}
            given += [(name, value) for name, value in more.items() if name not in names]
            compile_options.env_option_overrides = given
            compile_options.executable_build_options.optimization_level = 0
        return compile(backend, module, devices, compile_options, *args)


@functools.cache
def _launch_context() -> Any:
    return jax.make_user_context(None)


def own_launches(number: int) -> None:
    """Lets only the calling thread launch guarded programs in C++.

    Args:
      number: Another one at each call.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _launch_context()(number).__enter__()
    _jax.PjitFunctionCache.clear_all()


def frontend_attributes(module: Any) -> Mapping[str, Any]:
    """The frontend attributes of an MLIR module, by name."""
    attributes = module.operation.attributes
    if "mhlo.frontend_attributes" not in attributes:
        return {}
    return {named.name: named.attr for named in attributes["mhlo.frontend_attributes"]}


def is_run(backend: Any) -> bool:
    """Whether a backend runs what it compiles."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    return not isinstance(backend, _jax.CompileOnlyPyClient)
