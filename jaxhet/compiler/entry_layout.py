"""Arguments and results keep the layout and the memory (host or device) that the program sets.

XLA reads both from the layout of the entry computation; but in a module that a hook returns, it
reads them from the parameters and the root instruction.
"""

from jaxhet.compiler import hlo


def keep(module: hlo.Module, *, is_gpu: bool) -> None:
    """Writes the layout of the entry computation into its parameters and its root instruction.

    On CPUs only the memory of results is missing.
    """
    if is_gpu:
        _keep_of_arguments(module)
        keep_of_results(module)
        return
    root = module.entry.root
    shape = _with_layouts(root.shape, module.proto.host_program_shape.result)
    if shape.tuple_shapes:
        module.entry.reshape(root, shape)
    elif shape != root.shape:
        # A root that aliases an argument must have the argument's memory.
        module.entry.proto.root_id = module.entry.add("bitcast", shape, [root]).id


def keep_of_results(module: hlo.Module) -> None:
    """Writes the layout and the memory of the results into the root instruction."""
    root = module.entry.root
    module.entry.reshape(root, _with_layouts(root.shape, module.proto.host_program_shape.result))


def _keep_of_arguments(module: hlo.Module) -> None:
    """Writes the layout and the memory of the arguments into the parameters.

    XLA's layout assignment would give the users of a parameter in host memory host memory as well.
    The barrier behind such a parameter keeps it from that.
    """
    entry, layouts = module.entry, module.proto.host_program_shape.parameters
    for parameter in [i for i in entry.instructions if i.opcode == "parameter"]:
        before = hlo.Shape()
        before.CopyFrom(parameter.shape)
        shape = _with_layouts(before, layouts[parameter.parameter_number])
        entry.reshape(parameter, shape)
        if _is_on_host(shape):
            entry.hide(parameter, before)


def _with_layouts(shape: hlo.Shape, layouts: hlo.Shape) -> hlo.Shape:
    changed = hlo.Shape()
    changed.CopyFrom(shape)
    _copy(layouts, changed)
    return changed


def _copy(layouts: hlo.Shape, shape: hlo.Shape) -> None:
    for part_layouts, part in zip(layouts.tuple_shapes, shape.tuple_shapes, strict=True):
        _copy(part_layouts, part)
    if layouts.HasField("layout"):
        shape.layout.minor_to_major[:] = layouts.layout.minor_to_major
        shape.layout.memory_space = layouts.layout.memory_space


def _is_on_host(shape: hlo.Shape) -> bool:
    return shape.layout.memory_space != 0 or any(map(_is_on_host, shape.tuple_shapes))
