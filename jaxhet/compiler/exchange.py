"""The exchange as an instruction: how it is carried through XLA, and the call that the engine sees.

CPU  one custom call, `jaxhet_exchange`, from PRE on.
GPU  PRE adds a collective-permute-start/-done pair, which XLA's passes leave alone and its
     scheduler keeps apart. POST makes it the calls `jaxhet_start` and `jaxhet_done`, at the same
     places of the schedule.

Frontend attributes carry the plan from PRE to POST.
"""

import dataclasses
import enum
import json
from collections.abc import Sequence

from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo
from jaxhet.compiler import hlo_pb2 as pb
from jaxhet.compiler.collectives import Collective
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.options import Job, Options

EXCHANGE_TARGET = "jaxhet_exchange"
START_TARGET = "jaxhet_start"
DONE_TARGET = "jaxhet_done"

_INDEX, _PLAN, _LINE, _SOURCE, _CALL = (
    f"jaxhet_{name}" for name in ("index", "plan", "line", "source", "call")
)
_START_OPCODES = ("collective-permute-start", "custom-call")


class ExchangeKind(enum.IntEnum):
    """What moves; `ExchangeKind` of the engine."""

    PERMUTE = 0
    ALL_GATHER = 1
    ALL_TO_ALL = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange that PRE has added.

    Attributes:
      computation: Where it is.
      start: The instruction that starts it.
      attributes: Of the engine's call, without plan and index.
      line: What must be equal on all ranks, without the place in the program.
      source: What the user wrote.
      done: The instruction that waits for it, if that is another one.
      scatters: The local reduce-scatters that lead to it.
      gathers: The local all-gathers that follow.
    """

    computation: hlo.Computation
    start: hlo.Instruction
    attributes: dict[str, int | tuple[int, ...]]
    line: str
    source: str
    done: hlo.Instruction | None = None
    scatters: list[hlo.Instruction] = dataclasses.field(default_factory=list)
    gathers: list[hlo.Instruction] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What POST reads from an exchange: its place in a plan, its line and source."""

    index: int
    fingerprint: int
    line: str
    source: str


@dataclasses.dataclass(frozen=True)
class Adder:
    """Adds the exchanges of one collective.

    Attributes:
      collective: What they are part of.
      label: Reducer and algorithm, for the line.
      note: What else to tell the user.
      job: The job.
      options: The user's options.
      added: All exchanges of the module; new ones are appended.
    """

    collective: Collective
    label: str
    note: str
    job: Job
    options: Options
    added: list[Exchange]

    def call(
        self,
        kind: ExchangeKind,
        operands: Sequence[hlo.Instruction],
        results: Sequence[hlo.Shape],
        groups: Groups,
    ) -> list[hlo.Instruction]:
        """The CPU form: one call with one result per operand. Groups are in positions."""
        single = len(results) == 1
        start = self.collective.computation.add(
            "custom-call",
            results[0] if single else hlo.tuple_shape(results),
            operands,
            like=self.collective.instruction,
            custom_call_target=EXCHANGE_TARGET,
            custom_call_has_side_effect=True,
            custom_call_api_version=pb.API_VERSION_TYPED_FFI,
            constrain_layout=True,
            operand_shapes_with_layout=[o.shape for o in operands],
        )
        self.added.append(self._exchange(start, kind, operands, groups))
        if single:
            return [start]
        return [
            self.collective.computation.add(
                "get-tuple-element", shape, [start], like=self.collective.instruction, tuple_index=i
            )
            for i, shape in enumerate(results)
        ]

    def permute(self, x: hlo.Instruction, groups: Groups, shift: int) -> hlo.Instruction:
        """The GPU form: each member sends to the one `shift` places on. Groups are in positions."""
        pairs = [
            pb.SourceTarget(source=source, target=group[(i + shift) % len(group)])
            for group in groups
            for i, source in enumerate(group)
        ]
        start = self.collective.computation.add(
            "collective-permute-start",
            hlo.tuple_shape([x.shape, x.shape]),
            [x],
            like=self.collective.instruction,
            channel_id=self.collective.computation.module.new_channel_id(),
            source_target_pairs=pairs,
        )
        done = self.collective.computation.add(
            "collective-permute-done", x.shape, [start], like=self.collective.instruction
        )
        exchange = self._exchange(start, ExchangeKind.PERMUTE, [x], groups, shift)
        self.added.append(dataclasses.replace(exchange, done=done))
        return done

    def _exchange(
        self,
        start: hlo.Instruction,
        kind: ExchangeKind,
        operands: Sequence[hlo.Instruction],
        groups: Groups,
        shift: int = 0,
    ) -> Exchange:
        module = self.collective.computation.module
        ranks = groups_lib.map_groups(groups, self.collective.rank_of)
        attributes: dict[str, int | tuple[int, ...]] = {
            "session": self.job.session,
            "kind": int(kind),
            "ranks": tuple(rank for group in ranks for rank in group),
            "group_size": len(ranks[0]),
            "deadline_ms": self.options.deadline_ms,
        }
        name = kind.name.lower()
        if kind == ExchangeKind.PERMUTE:
            attributes["shift"] = shift
            name = f"{name}+{shift}"
        shapes = ",".join(hlo.shape_text(o.shape) for o in operands)
        line = f"{name} {self.label} {shapes} {groups_lib.to_text(ranks)}"
        source = f"{module.location(self.collective.instruction)} {self.note}"
        source = " ".join(source.replace('"', "'").split())
        return Exchange(self.collective.computation, start, attributes, line, source)


def finish(exchange: Exchange, entry: Entry) -> None:
    """Writes an exchange's place in the plan into its instruction."""
    start = exchange.start
    call = _attributes_text(exchange.attributes | {"plan": entry.fingerprint, "index": entry.index})
    carried = {
        _INDEX: str(entry.index),
        _PLAN: str(entry.fingerprint),
        _LINE: entry.line,
        _SOURCE: entry.source,
    }
    if start.opcode == "custom-call":
        start.backend_config = _backend_config("custom_call_config", call)
    else:
        carried[_CALL] = call
    for key, value in carried.items():
        start.frontend_attributes.map[key] = value


def may_be_in(module: bytes) -> bool:
    """Whether a serialized module can hold an exchange; cheap."""
    return _INDEX.encode() in module


def is_start(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is an exchange of ours, at POST."""
    return instruction.opcode in _START_OPCODES and _INDEX in instruction.frontend_attributes.map


def read(instruction: hlo.Instruction) -> Entry:
    """The plan's entry of an exchange."""
    attributes = instruction.frontend_attributes.map
    return Entry(
        int(attributes[_INDEX]), int(attributes[_PLAN]), attributes[_LINE], attributes[_SOURCE]
    )


def to_calls(computation: hlo.Computation, start: hlo.Instruction, done: hlo.Instruction) -> None:
    """Makes a permute pair, in place, `y = jaxhet_start(x)` and `jaxhet_done(y, x)`.

    x is an operand of done too, so that it lives until then; done's result is y's buffer.
    """
    (x,) = computation.operands(start)
    config = _backend_config("custom_call_backend_config", start.frontend_attributes.map[_CALL])
    _to_call(computation, start, START_TARGET, [x], config)
    _to_call(computation, done, DONE_TARGET, [start, x], config)
    done.output_operand_aliasing.add(operand_index=0)


def _to_call(
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    target: str,
    operands: Sequence[hlo.Instruction],
    config: bytes,
) -> None:
    computation.rewrite(
        instruction,
        "custom-call",
        operands,
        shape=operands[0].shape,
        custom_call_target=target,
        custom_call_has_side_effect=True,
        custom_call_api_version=pb.API_VERSION_TYPED_FFI,
        constrain_layout=True,
        operand_shapes_with_layout=[o.shape for o in operands],
        backend_config=config,
    )


def _attributes_text(attributes: dict[str, int | tuple[int, ...]]) -> str:
    """The attributes as an MLIR dictionary."""

    def value(v: int | tuple[int, ...]) -> str:
        return f"{v} : i64" if isinstance(v, int) else f"array<i64: {', '.join(map(str, v))}>"

    return "{" + ", ".join(f"{name} = {value(v)}" for name, v in attributes.items()) + "}"


def _backend_config(form: str, attributes: str) -> bytes:
    return json.dumps({form: {"attributes": attributes}}).encode()
