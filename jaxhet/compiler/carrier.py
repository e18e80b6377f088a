"""The HLO that carries an exchange through XLA, and the call that the engine sees.

CPU  one custom call, `jaxhet_exchange`, from PRE on.
GPU  PRE adds a pair of start and done of a collective, the carrier, which XLA's passes leave alone
     and its scheduler keeps apart. POST replaces it by the calls `jaxhet_start` and `jaxhet_done`,
     at the same places of the schedule. If data arrives in parts, `jaxhet_done` waits for the first
     part, and calls of `jaxhet_part`, which PRE adds, wait for the others.

A frontend attribute of the start holds the record of the exchange (`exchange.py`).
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo, order
from jaxhet.compiler import proto as pb
from jaxhet.compiler.collectives import Collective, Identity
from jaxhet.compiler.exchange import Call, ExchangeKind, ExchangeSpec, Half, Movement
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.options import Job, Options

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


@dataclasses.dataclass(frozen=True)
class ExchangeBuilder:
    """Adds the exchanges of one collective.

    Attributes:
      collective: The collective that the exchanges belong to.
      name: Opcode, reducer and dimension of the collective.
      algorithm: "flat", "hierarchical" or "direct".
      note: Reason for the algorithm, for the user.
      job: The job.
      options: The user's options.
      added: All exchanges of the module; new ones are appended.
      codec: Codec of the collective; `codecs.fitting` says which operands it compresses.
      wire: Codec and block of the exchanged data; "": operands without a codec.
      plain_bytes: With `wire`, size of the operand before it is encoded.
      half: The half of an exchange that the collective stands for; None: a whole exchange.
    """

    collective: Collective
    name: str
    algorithm: str
    note: str
    job: Job
    options: Options
    added: list[Exchange]
    codec: str = ""
    wire: str = ""
    plain_bytes: int = 0
    half: Half | None = None

    def call(
        self,
        kind: ExchangeKind,
        operands: Sequence[hlo.Instruction],
        results: Sequence[hlo.Shape],
        groups: Groups,
        numbers: tuple[int, ...],
    ) -> list[hlo.Instruction]:
        """The CPU form: one call with one result per operand.

        `groups` holds indices of `Collective.rank_of`; for a permute, pairs of source and
        target. `numbers` says which of the collective's operands `operands` hold. An all-gather's
        results have a row for each member of the largest group; rows without a member are
        undefined.
        """
        single = len(results) == 1
        start = self.collective.computation.add(
            "custom-call",
            results[0] if single else hlo.tuple_shape(results),
            operands,
            like=self.collective.instruction,
            stem=f"exchange.{kind.name.lower()}",
            **_call_fields(EXCHANGE_TARGET, operands),
        )
        size = groups_lib.largest(groups)
        self.added.append(self._exchange(start, kind, operands, groups, size, numbers))
        if single:
            return [start]
        return [
            self.collective.computation.add(
                "get-tuple-element", shape, [start], like=self.collective.instruction, tuple_index=i
            )
            for i, shape in enumerate(results)
        ]

    def carry(
        self,
        kind: ExchangeKind,
        x: hlo.Instruction,
        groups: Groups,
        numbers: tuple[int, ...],
        skips_own: bool = False,
        part_elements: int = 0,
    ) -> hlo.Instruction:
        """The GPU form of a flat array, which holds the collective's operands of these numbers.

        `groups` holds indices of `Collective.rank_of`; for a permute, pairs of source and
        target. With `skips_own`, the device's own row of the result is undefined. A result has a
        row for each member of the largest group, or more; rows without a member are undefined. A
        permute can be split into parts of `part_elements`. The returned done waits for the first
        part; call `next_part` for each of the others.
        """
        result = x.shape
        size = groups_lib.largest(groups)
        fields: dict[str, Any]
        if kind == ExchangeKind.ALL_GATHER and self.half is None:
            # XLA wants groups of equal size; the engine moves what the groups themselves say.
            carriers = groups_lib.covering(groups, len(self.collective.rank_of))
            size = len(carriers[0])
            result = hlo.array_shape(x.shape.element_type, [hlo.num_elements(x.shape) * size])
            opcode = "all-gather-start"
            fields = {
                "dimensions": [0],
                "use_global_device_ids": True,
                "collective_device_list": hlo.device_list(carriers),
            }
        else:  # XLA sees the part of an all-to-all that is sent to the next member
            pairs = groups if kind == ExchangeKind.PERMUTE else _each_to_next(groups)
            if self.half is not None:
                pairs = self.collective.groups  # the program's pairs
            opcode = "collective-permute-start"
            fields = {
                "source_target_pairs": [pb.SourceTarget(source=s, target=t) for s, t in pairs]
            }
        collective = self.collective
        start = collective.computation.add(
            opcode,
            hlo.tuple_shape([x.shape, result]),
            [x],
            like=collective.instruction,
            stem=f"start.{kind.name.lower()}",
            channel_id=collective.computation.module.new_channel_id(),
            **fields,
        )
        done = collective.computation.add(
            CARRIERS[opcode],
            result,
            [start],
            like=collective.instruction,
            stem=f"done.{kind.name.lower()}",
        )
        exchange = self._exchange(start, kind, [x], groups, size, numbers)
        movement = dataclasses.replace(
            exchange.spec.movement,
            skips_own=skips_own,
            part_bytes=part_elements * hlo.bit_width(x.shape.element_type) // 8,
        )
        spec = dataclasses.replace(exchange.spec, movement=movement)
        self.added.append(dataclasses.replace(exchange, spec=spec, done=done))
        return done

    def next_part(self, received: hlo.Instruction, other: hlo.Instruction) -> list[hlo.Instruction]:
        """Waits for the next part of the latest exchange; `received` holds the parts before it.

        Returns both arrays again. Instructions that use these results run after the wait.
        """
        add, operands = self.collective.computation.add, [received, other]
        shapes = [x.shape for x in operands]
        part = add(
            "custom-call",
            hlo.tuple_shape(shapes),
            operands,
            like=self.collective.instruction,
            stem="part",
            **_call_fields(PART_TARGET, operands),
        )
        for i in range(len(operands)):
            part.output_operand_aliasing.add(output_shape_index=[i], operand_index=i)
        self.added[-1].parts.append(part)
        return [
            add("get-tuple-element", shape, [part], tuple_index=i) for i, shape in enumerate(shapes)
        ]

    def _exchange(
        self,
        start: hlo.Instruction,
        kind: ExchangeKind,
        operands: Sequence[hlo.Instruction],
        groups: Groups,
        group_size: int,
        numbers: tuple[int, ...],
    ) -> Exchange:
        collective = self.collective
        identities = tuple(collective.identities[number] for number in numbers)
        ranks = groups_lib.map_groups(groups, collective.rank_of)
        path = order.for_people(identities[0].path)
        source = collective.computation.module.location(collective.instruction, path)
        if len(identities) > 1:
            source += f" and {len(identities) - 1} more"
        receivers = self._most_receivers(kind, ranks)
        parts = len(ranks[0]) if kind == ExchangeKind.ALL_TO_ALL else 1
        sent = sum(hlo.num_bytes(o.shape) for o in operands)
        half = self.half
        moved = 0 if half is not None and half.is_finish else sent
        spec = ExchangeSpec(
            Call(self.job.session),
            Movement(
                kind=kind,
                ranks=groups_lib.padded(ranks, group_size),
                group_size=group_size,
                deadline_ms=self.options.deadline_ms,
                handle=half.key if half else 0,
                is_finish=half is not None and half.is_finish,
                handle_bytes=sent if half else 0,
            ),
            collective=self.name,
            algorithm=self.algorithm,
            num_operands=len(collective.instruction.operand_ids),
            shapes=",".join(hlo.shape_text(o.shape) for o in operands),
            groups=ranks,
            digest=_digest(identities),
            source=" ".join(source.replace('"', "'").split()),
            note=self.note,
            num_bytes=-(-moved * receivers // parts),
            num_collectives=len(identities),
            is_pipelined=collective.is_pipelined,
            wire=self.wire,
            plain_bytes=-(-self.plain_bytes * receivers // parts),
        )
        is_gather = collective.instruction.opcode == "all-gather"
        return Exchange(
            collective.computation, start, spec, identities, is_gather, collective.is_early
        )

    def _most_receivers(self, kind: ExchangeKind, ranks: Groups) -> int:
        """Largest number of ranks on other islands to which one rank sends."""
        islands = self.job.islands
        if kind == ExchangeKind.PERMUTE:
            crossing = [s for s, t in ranks if islands[s] != islands[t]]
            return max(collections.Counter(crossing).values(), default=0)
        return max(
            sum(islands[other] != islands[rank] for other in group)
            for group in ranks
            for rank in group
        )


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
        fields = _call_fields(target, operands)
        computation.rewrite(
            instruction, "custom-call", operands, shape=done.shape, backend_config=config, **fields
        )
    start.frontend_attributes.map.update(attributes)
    done.frontend_attributes.map[_INDEX] = str(spec.index)
    done.output_operand_aliasing.add(operand_index=0)


def _each_to_next(groups: Groups) -> Groups:
    """Each member, and the one after it."""
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


def _call_fields(target: str, operands: Sequence[hlo.Instruction]) -> dict[str, Any]:
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


def _digest(identities: Sequence[Identity]) -> str:
    text = "\n".join(map(str, identities))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
