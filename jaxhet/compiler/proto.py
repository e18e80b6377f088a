"""XLA's HloModuleProto: the fields that the passes read or write. The others survive, unknown.

Numbers and meaning: xla/service/hlo.proto and xla/xla_data.proto of OpenXLA. The package is our
own, so that a process may load XLA's descriptors as well. Attributes of this module are the message
classes, and the values of `PrimitiveType`.
"""

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_PACKAGE = "jaxhet.hlo"
API_VERSION_TYPED_FFI = 4  # value of CustomCallApiVersion

# In the order of their numbers.
_PRIMITIVE_TYPES = """
PRIMITIVE_TYPE_INVALID PRED S8 S16 S32 S64 U8 U16 U32 U64 F16 F32 F64 TUPLE OPAQUE_TYPE C64 BF16
TOKEN C128 F8E5M2 F8E4M3FN S4 U4 F8E4M3B11FNUZ F8E5M2FNUZ F8E4M3FNUZ S2 U2 F8E4M3 F8E3M4 S1 U1
F4E2M1FN F8E8M0FNU BUFFER
"""

# Message to fields, field to number and type. `*`: repeated; `key: value`: a map.
_MESSAGES = {
    "LayoutProto": {"minor_to_major": (1, "int64*"), "memory_space": (8, "int64")},
    "ShapeProto": {
        "element_type": (2, "PrimitiveType"),
        "dimensions": (3, "int64*"),
        "tuple_shapes": (4, "ShapeProto*"),
        "layout": (5, "LayoutProto"),
        "is_dynamic_dimension": (6, "bool*"),
    },
    "ProgramShapeProto": {
        "parameters": (1, "ShapeProto*"),
        "result": (2, "ShapeProto"),
        "parameter_names": (3, "string*"),
    },
    "OpMetadata": {
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
        "stack_frame_id": (15, "int32"),
    },
    "LiteralProto": {
        "shape": (1, "ShapeProto"),
        "s32s": (4, "int32*"),
        "s64s": (5, "int64*"),
        "u32s": (6, "uint32*"),
        "u64s": (7, "uint64*"),
    },
    "ReplicaGroup": {"replica_ids": (1, "int64*")},
    "IotaReplicaGroupListProto": {
        "num_replica_groups": (1, "int64"),
        "iota_reshape_dims": (3, "int64*"),
        "iota_transpose_perm": (4, "int32*"),
    },
    "CollectiveDeviceListProto": {
        "replica_groups": (1, "ReplicaGroup*"),
        "iota_replica_group_list": (2, "IotaReplicaGroupListProto"),
    },
    "MeshProto": {"axes": (1, "MeshAxis*"), "device_ids": (2, "int64*")},
    "MeshAxis": {"size": (2, "int64")},
    "AxisRefProto": {"mesh_axis_index": (1, "int64"), "sub_axis_info": (2, "SubAxis")},
    "SubAxis": {"pre_size": (1, "int64"), "size": (2, "int64")},
    "MeshAxesReplicaGroupListProto": {"mesh": (1, "MeshProto"), "axes": (2, "AxisRefProto*")},
    "SourceTarget": {"source": (1, "int64"), "target": (2, "int64")},
    "FrontendAttributes": {"map": (1, "string: string")},
    "OutputOperandAliasing": {"output_shape_index": (1, "int64*"), "operand_index": (2, "int64")},
    "PaddingConfig": {"dimensions": (1, "PaddingConfigDimension*")},
    "PaddingConfigDimension": {"edge_padding_high": (2, "int64")},
    "HloInstructionProto": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "literal": (8, "LiteralProto"),
        "parameter_number": (9, "int64"),
        "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"),
        "dimensions": (14, "int64*"),
        "slice_dimensions": (17, "SliceDimensions*"),
        "dynamic_slice_sizes": (20, "int64*"),
        "padding_config": (21, "PaddingConfig"),
        "channel_id": (26, "int64"),
        "custom_call_target": (28, "string"),
        "id": (35, "int64"),
        "operand_ids": (36, "int64*"),
        "control_predecessor_ids": (37, "int64*"),
        "called_computation_ids": (38, "int64*"),
        "backend_config": (43, "bytes"),
        "is_host_transfer": (47, "bool"),
        "replica_groups": (49, "ReplicaGroup*"),
        "source_target_pairs": (52, "SourceTarget*"),
        "constrain_layout": (56, "bool"),
        "operand_shapes_with_layout": (57, "ShapeProto*"),
        "comparison_direction": (63, "string"),
        "custom_call_has_side_effect": (65, "bool"),
        "frontend_attributes": (68, "FrontendAttributes"),
        "use_global_device_ids": (71, "bool"),
        "comparison_type": (72, "string"),
        "output_operand_aliasing": (74, "OutputOperandAliasing*"),
        "custom_call_api_version": (77, "int32"),
        "collective_device_list": (87, "CollectiveDeviceListProto"),
        "iota_collective_device_list": (92, "IotaReplicaGroupListProto"),
        "mesh_axes_replica_group_list": (93, "MeshAxesReplicaGroupListProto"),
    },
    "SliceDimensions": {
        "start": (1, "int64"),
        "limit": (2, "int64"),
        "stride": (3, "int64"),
    },
    "HloComputationProto": {
        "name": (1, "string"),
        "instructions": (2, "HloInstructionProto*"),
        "program_shape": (4, "ProgramShapeProto"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
        "is_fusion_computation": (7, "bool"),
    },
    "HloScheduleProto": {"sequences": (1, "int64: InstructionSequence")},
    "InstructionSequence": {"instruction_ids": (1, "int64*")},
    "DeviceAssignmentProto": {
        "replica_count": (1, "int32"),
        "computation_count": (2, "int32"),
        "computation_devices": (3, "ComputationDevice*"),
    },
    "ComputationDevice": {"replica_device_ids": (1, "int64*")},
    "StackFrameIndexProto": {
        "file_names": (1, "string*"),
        "file_locations": (3, "FileLocation*"),
        "stack_frames": (4, "StackFrame*"),
    },
    "FileLocation": {"file_name_id": (1, "int32"), "line": (3, "int32")},
    "StackFrame": {"file_location_id": (1, "int32")},
    "HloModuleProto": {
        "name": (1, "string"),
        "computations": (3, "HloComputationProto*"),
        "host_program_shape": (4, "ProgramShapeProto"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "HloScheduleProto"),
        "device_assignment": (15, "DeviceAssignmentProto"),
        "stack_frame_index": (17, "StackFrameIndexProto"),
        "frontend_attributes": (19, "FrontendAttributes"),
    },
}


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    kind = kind.removesuffix("*")
    if (scalar := getattr(field, f"TYPE_{kind.upper()}", None)) is not None:
        field.type = scalar
    else:
        field.type = field.TYPE_ENUM if kind == "PrimitiveType" else field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    if ": " in kind:
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        for place, part in enumerate(kind.split(": "), 1):
            _set_type(entry.field.add(name=("key", "value")[place - 1], number=place), part)
        kind = f"{message.name}.{entry.name}*"
    _set_type(message.field.add(name=name, number=number), kind)


def _build() -> dict[str, Any]:
    """The attributes of this module."""
    file = descriptor_pb2.FileDescriptorProto(
        name="jaxhet/compiler/proto.py", package=_PACKAGE, syntax="proto3"
    )
    enum = file.enum_type.add(name="PrimitiveType")
    for number, name in enumerate(_PRIMITIVE_TYPES.split()):
        enum.value.add(name=name, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = EnumTypeWrapper(pool.FindEnumTypeByName(f"{_PACKAGE}.PrimitiveType"))
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }
    return {**classes, **dict(types.items()), "PrimitiveType": types}


globals().update(_build())
