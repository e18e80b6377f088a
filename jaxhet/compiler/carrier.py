"""The HLO that carries an exchange through XLA, and the call that the engine sees.

CPU  one custom call, `jaxhet_exchange`, from PRE on.
GPU  PRE adds a pair of start and done of a collective, the carrier, which XLA's passes leave alone
     and its scheduler keeps apart. POST replaces it by the calls `jaxhet_start` and `jaxhet_done`,
     at the same places of the schedule. If data arrives in parts, `jaxhet_done` waits for the first
     part, and calls of `jaxhet_part`, which PRE adds, wait for the others.

A frontend attribute of the start holds the record of the exchange (`exchange.py`).
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxhet.compiler import hlo, order
from jaxhet.compiler import proto as pb
from jaxhet.compiler.collectives import Identity
from jaxhet.compiler.exchange import Call, ExchangeSpec

EXCHANGE_TARGET = "jaxhet_exchange"
START_TARGET = "jaxhet_start"
DONE_TARGET = "jaxhet_done"
PART_TARGET = "jaxhet_part"
DEVICE_TARGETS = (START_TARGET, DONE_TARGET, PART_TARGET)
# Opcode of a carrier's start → opcode of its done.
CARRIERS = {
    "collective-permute-start": "collective-permute-done",
    "all-gather-start": "all-gather-done",
}

_SPEC = "jaxhet_spec"  # on a start: the record
_INDEX = "jaxhet_index"  # on other calls: the index of the exchange
_START_OPCODES = (*CARRIERS, "custom-call")


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange that PRE has added.

    Attributes:
      computation: Where it is.
      start: The instruction that starts it.
      spec: The record, without its place in the plan.
      identities: The operands of the user's collectives that share this exchange, in the order of
        their data.
      is_gather: Whether it belongs to an all-gather, whose operand is often ready early.
      is_early: Whether the gather's operand is ready when its computation begins.
      done: The instruction that waits for the exchange, if that is another one.
      parts: The instructions that wait for the parts after the first.
      scatters: The local reduce-scatters before the exchange.
      gathers: The local all-gathers after the exchange.
    """

    computation: hlo.Computation
    start: hlo.Instruction
    spec: ExchangeSpec
    identities: tuple[Identity, ...]
    is_gather: bool
    is_early: bool
    done: hlo.Instruction | None = None
    parts: list[hlo.Instruction] = dataclasses.field(default_factory=list)
    scatters: list[hlo.Instruction] = dataclasses.field(default_factory=list)
    gathers: list[hlo.Instruction] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> order.Key:
        """Place in the order of the program, which is the place of the last collective."""
        return max(identity.key for identity in self.identities)

    @property
    def use(self) -> float:
        """The depth at which the first of its results is used."""
        return min(identity.use for identity in self.identities)


def finish(exchange: Exchange, spec: ExchangeSpec) -> None:
    """Writes the record of an exchange, with its place in the plan, into its instructions."""
    exchange.start.frontend_attributes.map[_SPEC] = spec.to_json()
    if exchange.start.opcode == "custom-call":
        exchange.start.backend_config = _backend_config("custom_call_config", spec.call)
    for part in exchange.parts:
        part.backend_config = _backend_config("custom_call_backend_config", spec.call)
        part.frontend_attributes.map[_INDEX] = str(spec.index)


def may_be_in(module: bytes) -> bool:
    """Whether a serialized module can hold an exchange; cheap."""
    return _SPEC.encode() in module


def is_start(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is an exchange of ours, at POST."""
    return instruction.opcode in _START_OPCODES and _SPEC in instruction.frontend_attributes.map


def read(start: hlo.Instruction) -> ExchangeSpec:
    """The record of an exchange."""
    return ExchangeSpec.from_json(start.frontend_attributes.map[_SPEC])


def index_of_call(instruction: hlo.Instruction) -> int:
    """The index of the exchange that a call starts or waits for; -1 for other instructions."""
    if is_start(instruction):
        return read(instruction).index
    return int(instruction.frontend_attributes.map.get(_INDEX, -1))


def to_calls(computation: hlo.Computation, start: hlo.Instruction, done: hlo.Instruction) -> None:
    """Makes a carrier, in place, `y = jaxhet_start(x)` and `jaxhet_done(y, x)`.

    x is an operand of done too, so that it lives until then; done's result is y's buffer. The start
    keeps the record: the compiled program still holds its plan.
    """
    (x,) = computation.operands(start)
    spec = read(start)
    attributes = dict(start.frontend_attributes.map)
    config = _backend_config("custom_call_backend_config", spec.call)
    for instruction, target, operands in (
        (start, START_TARGET, [x]),
        (done, DONE_TARGET, [start, x]),
    ):
        fields = call_fields(target, operands)
        computation.rewrite(
            instruction, "custom-call", operands, shape=done.shape, backend_config=config, **fields
        )
    start.frontend_attributes.map.update(attributes)
    done.frontend_attributes.map[_INDEX] = str(spec.index)
    done.output_operand_aliasing.add(operand_index=0)


def call_fields(target: str, operands: Sequence[hlo.Instruction]) -> dict[str, Any]:
    """The fields of a call of the engine."""
    return {
        "custom_call_target": target,
        "custom_call_has_side_effect": True,
        "custom_call_api_version": pb.API_VERSION_TYPED_FFI,
        "constrain_layout": True,
        "operand_shapes_with_layout": [o.shape for o in operands],
    }


def _backend_config(form: str, call: Call) -> bytes:
    return json.dumps({form: {"attributes": call.text}}).encode()
