"""The exchange as an instruction: how it is carried through XLA, and the call that the engine sees.

CPU  one custom call, `jaxhet_exchange`, from PRE on.
GPU  PRE adds a pair of start and done of a collective, the carrier, which XLA's passes leave alone
     and its scheduler keeps apart. POST makes it the calls `jaxhet_start` and `jaxhet_done`, at the
     same places of the schedule. What comes in parts is done with the first; a `jaxhet_part`, from
     PRE on, waits for the next.

Frontend attributes carry the plan from PRE to POST.
"""

import collections
import dataclasses
import enum
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxhet._errors import JaxhetError
from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler import hlo, order
from jaxhet.compiler import hlo_pb2 as pb
from jaxhet.compiler.collectives import Collective, Identity
from jaxhet.compiler.groups import Groups
from jaxhet.compiler.options import Job, Options

EXCHANGE_TARGET = "jaxhet_exchange"
START_TARGET = "jaxhet_start"
DONE_TARGET = "jaxhet_done"
PART_TARGET = "jaxhet_part"
DEVICE_TARGETS = (START_TARGET, DONE_TARGET, PART_TARGET)

_INDEX, _PLAN, _LINE, _SOURCE, _NOTE, _BYTES, _COUNT, _CALL, _PIPELINED = (
    f"jaxhet_{name}"
    for name in ("index", "plan", "line", "source", "note", "bytes", "count", "call", "pipelined")
)
ALGORITHMS = ("flat", "hierarchical")
# By the opcode of its start, that of a carrier's done.
CARRIERS = {
    "collective-permute-start": "collective-permute-done",
    "all-gather-start": "all-gather-done",
}
_START_OPCODES = (*CARRIERS, "custom-call")


class ExchangeKind(enum.IntEnum):
    """The pattern of data movement; equal to the engine's `ExchangeKind`."""

    PERMUTE = 0
    ALL_GATHER = 1
    ALL_TO_ALL = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange that PRE has added.

    Attributes:
      computation: Where it is.
      start: The instruction that starts it.
      attributes: Attributes of the engine's call, without plan and index.
      line: Text that must be equal on all ranks, without the place in the program.
      source: The user's operation and source line.
      note: Why it is as it is.
      num_bytes: Largest number of bytes that a rank sends to other islands.
      identities: The operands of the user's collectives that share this exchange, in the order in
        which they lie in its operand.
      is_gather: It belongs to an all-gather, whose operand is often there long before its turn.
      is_pipelined: Whether the collective was moved to a neighbouring iteration of a loop.
      done: The instruction that waits for it, if that is another one.
      parts: The instructions that wait for its parts after the first.
      scatters: The local reduce-scatters that lead to it.
      gathers: The local all-gathers that follow.
    """

    computation: hlo.Computation
    start: hlo.Instruction
    attributes: dict[str, int | tuple[int, ...]]
    line: str
    source: str
    note: str
    num_bytes: int
    identities: tuple[Identity, ...]
    is_gather: bool
    is_pipelined: bool = False
    done: hlo.Instruction | None = None
    parts: list[hlo.Instruction] = dataclasses.field(default_factory=list)
    scatters: list[hlo.Instruction] = dataclasses.field(default_factory=list)
    gathers: list[hlo.Instruction] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> order.Key:
        """Place in the order of the program: that of the last collective."""
        return max(identity.key for identity in self.identities)

    @property
    def use(self) -> float:
        """The depth at which the first of its results is used."""
        return min(identity.use for identity in self.identities)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An exchange in a plan; what POST reads.

    Attributes:
      index: Place in the plan.
      fingerprint: Fingerprint of the plan.
      line: Text that must be equal on all ranks: place in the program, kind, collective, algorithm,
        shapes, groups of ranks, and a digest of the identities of its collectives.
      source: The user's operation and source line.
      note: Why it is as it is, or "".
      num_bytes: Largest number of bytes that a rank sends to ranks on other islands.
      num_collectives: Number of operands of the user's collectives that share it.
    """

    index: int
    fingerprint: int
    line: str
    source: str
    note: str
    num_bytes: int
    num_collectives: int = 1

    @property
    def parts(self) -> "Parts":
        """The fields of the line."""
        match = _PARTS.fullmatch(self.line)
        if match is None:
            raise JaxhetError(f"{self.line!r} is no line of a plan")
        place, kind, label, shapes, members = match.groups()
        words = label.split()
        algorithm = next((a for a in ALGORITHMS if a in words), "direct")
        own = itertools.takewhile(lambda word: word not in ALGORITHMS, words)
        groups = tuple(tuple(map(int, g.split(","))) for g in members.strip("{}").split("},{"))
        return Parts(place, kind, " ".join(own), algorithm, shapes, groups)


_KINDS = "|".join(kind.name.lower() for kind in ExchangeKind)
# A line of `ExchangeBuilder` and `plan.make`: place, kind, label, shapes, groups, marks that
# distinguish it from look-alikes, and a digest of its identities.
_PARTS = re.compile(rf"(.*?) ({_KINDS}) (.*) (\S+) (\{{.*\}}\}})(?: [#@].*)?")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The fields of a line of a plan.

    Attributes:
      place: Program and control flow around the exchange.
      kind: The name of an `ExchangeKind`, in lower case.
      collective: Opcode, reducer and dimension of the collective.
      algorithm: "flat", "hierarchical" or, from each source to its targets, "direct".
      shapes: Shapes of the operands, with commas between them.
      groups: Ranks that exchange with each other; of a permute, pairs of source and target.
    """

    place: str
    kind: str
    collective: str
    algorithm: str
    shapes: str
    groups: Groups


@dataclasses.dataclass(frozen=True)
class ExchangeBuilder:
    """Adds the exchanges of one collective.

    Attributes:
      collective: The collective that the exchanges belong to.
      label: Name of the collective and the algorithm, for the line.
      note: Why it is so, for the user.
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
        numbers: tuple[int, ...],
    ) -> list[hlo.Instruction]:
        """The CPU form: one call with one result per operand.

        Groups are in positions; those of a permute are pairs of source and target. The operands
        hold the collective's operands of these numbers. An all-gather's results have a row for each
        member of the largest group; rows without a member are undefined.
        """
        single = len(results) == 1
        start = self.collective.computation.add(
            "custom-call",
            results[0] if single else hlo.tuple_shape(results),
            operands,
            like=self.collective.instruction,
            stem=f"exchange.{kind.name.lower()}",
            custom_call_target=EXCHANGE_TARGET,
            custom_call_has_side_effect=True,
            custom_call_api_version=pb.API_VERSION_TYPED_FFI,
            constrain_layout=True,
            operand_shapes_with_layout=[o.shape for o in operands],
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

        Groups are in positions; those of a permute are pairs of source and target. If `skips_own`,
        the device's own row of the result is undefined. A result has a row for each member of the
        largest group, or more; rows without a member are undefined. A permute can be split
        into parts of `part_elements`. The returned done waits for the first part; call `next_part`
        for each of the others.
        """
        result = x.shape
        size = groups_lib.largest(groups)
        fields: dict[str, Any]
        if kind == ExchangeKind.ALL_GATHER:
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
        else:  # XLA sees of an all-to-all what goes to the next member
            pairs = groups if kind == ExchangeKind.PERMUTE else _each_to_next(groups)
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
        attributes = exchange.attributes | {
            "skips_own": int(skips_own),
            "part_bytes": part_elements * hlo.bit_width(x.shape.element_type) // 8,
        }
        self.added.append(dataclasses.replace(exchange, attributes=attributes, done=done))
        return done

    def next_part(self, received: hlo.Instruction, other: hlo.Instruction) -> list[hlo.Instruction]:
        """Waits for the next part of the latest exchange; `received` holds the parts before it.

        Gives it and the other array again: what uses them comes after the wait.
        """
        add, operands = self.collective.computation.add, [received, other]
        shapes = [x.shape for x in operands]
        part = add(
            "custom-call",
            hlo.tuple_shape(shapes),
            operands,
            like=self.collective.instruction,
            stem="part",
            custom_call_target=PART_TARGET,
            custom_call_has_side_effect=True,
            custom_call_api_version=pb.API_VERSION_TYPED_FFI,
            constrain_layout=True,
            operand_shapes_with_layout=shapes,
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
        module = self.collective.computation.module
        identities = tuple(self.collective.identities[number] for number in numbers)
        ranks = groups_lib.map_groups(groups, self.collective.rank_of)
        attributes: dict[str, int | tuple[int, ...]] = {
            "session": self.job.session,
            "kind": int(kind),
            "ranks": groups_lib.padded(ranks, group_size),
            "group_size": group_size,
            "deadline_ms": self.options.deadline_ms,
        }
        shapes = ",".join(hlo.shape_text(o.shape) for o in operands)
        line = f"{kind.name.lower()} {self.label} {shapes} {groups_lib.to_text(ranks)}"
        path = order.for_people(identities[0].path)
        source = module.location(self.collective.instruction, path)
        if len(identities) > 1:
            source += f" and {len(identities) - 1} more"
        sent = sum(hlo.num_bytes(o.shape) for o in operands) * self._most_receivers(kind, ranks)
        if kind == ExchangeKind.ALL_TO_ALL:
            sent = -(-sent // len(ranks[0]))
        return Exchange(
            self.collective.computation,
            start,
            attributes,
            line,
            " ".join(source.replace('"', "'").split()),
            self.note,
            sent,
            identities,
            self.collective.instruction.opcode == "all-gather",
            self.collective.is_pipelined,
        )

    def _most_receivers(self, kind: ExchangeKind, ranks: Groups) -> int:
        """To how many ranks on other islands a rank sends, the most of all ranks."""
        islands = self.job.islands
        if kind == ExchangeKind.PERMUTE:
            crossing = [s for s, t in ranks if islands[s] != islands[t]]
            return max(collections.Counter(crossing).values(), default=0)
        return max(
            sum(islands[other] != islands[rank] for other in group)
            for group in ranks
            for rank in group
        )


def finish(exchange: Exchange, entry: Entry) -> None:
    """Writes an exchange's place in the plan into its instruction."""
    start = exchange.start
    call = _attributes_text(exchange.attributes | {"plan": entry.fingerprint, "index": entry.index})
    carried = {
        _INDEX: str(entry.index),
        _PLAN: str(entry.fingerprint),
        _LINE: entry.line,
        _SOURCE: entry.source,
        _NOTE: entry.note,
        _BYTES: str(entry.num_bytes),
        _COUNT: str(entry.num_collectives),
    }
    if start.opcode == "custom-call":
        start.backend_config = _backend_config("custom_call_config", call)
    else:
        carried[_CALL] = call
        if exchange.is_pipelined:
            carried[_PIPELINED] = "1"
    for part in exchange.parts:
        part.backend_config = _backend_config("custom_call_backend_config", call)
    for key, value in carried.items():
        start.frontend_attributes.map[key] = value


def may_be_in(module: bytes) -> bool:
    """Whether a serialized module can hold an exchange; cheap."""
    return _INDEX.encode() in module


def is_start(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is an exchange of ours, at POST."""
    return instruction.opcode in _START_OPCODES and _INDEX in instruction.frontend_attributes.map


def is_pipelined(start: hlo.Instruction) -> bool:
    """Whether a start belongs to a collective that was moved to a neighbouring iteration."""
    return _PIPELINED in start.frontend_attributes.map


def read(instruction: hlo.Instruction) -> Entry:
    """The plan's entry of an exchange."""
    attributes = instruction.frontend_attributes.map
    return Entry(
        int(attributes[_INDEX]),
        int(attributes[_PLAN]),
        attributes[_LINE],
        attributes[_SOURCE],
        attributes[_NOTE],
        int(attributes[_BYTES]),
        int(attributes[_COUNT]),
    )


def index_of_call(instruction: hlo.Instruction) -> int:
    """The index that the engine is given by a call, or -1 if it is none of the engine."""
    if instruction.custom_call_target not in (EXCHANGE_TARGET, *DEVICE_TARGETS):
        return -1
    (config,) = json.loads(instruction.backend_config).values()
    return int(config["attributes"].split("index = ")[1].split(" ")[0])


def to_calls(computation: hlo.Computation, start: hlo.Instruction, done: hlo.Instruction) -> None:
    """Makes a carrier, in place, `y = jaxhet_start(x)` and `jaxhet_done(y, x)`.

    x is an operand of done too, so that it lives until then; done's result is y's buffer. The start
    keeps what `read` needs: the compiled program still holds its plan.
    """
    (x,) = computation.operands(start)
    carried = dict(start.frontend_attributes.map)
    config = _backend_config("custom_call_backend_config", carried.pop(_CALL))
    _to_call(computation, start, START_TARGET, [x], done.shape, config)
    start.frontend_attributes.map.update(carried)
    _to_call(computation, done, DONE_TARGET, [start, x], done.shape, config)
    done.output_operand_aliasing.add(operand_index=0)


def _each_to_next(groups: Groups) -> Groups:
    """Each member, and the one after it."""
    return tuple(
        pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
    )


def _to_call(
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    target: str,
    operands: Sequence[hlo.Instruction],
    result: hlo.Shape,
    config: bytes,
) -> None:
    computation.rewrite(
        instruction,
        "custom-call",
        operands,
        shape=result,
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
