"""The record of an exchange: for the plan, the engine and the user.

PRE writes the record into the module as JSON, and POST, the cache and `jaxhet plan` read it there.
"""

import dataclasses
import enum
import hashlib
import json
from typing import Self

from jaxhet.compiler import groups as groups_lib
from jaxhet.compiler.groups import Groups

ALGORITHMS = ("flat", "hierarchical")
DIRECT = "direct"


class ExchangeKind(enum.IntEnum):
    """The pattern of data movement; equal to the engine's `ExchangeKind`."""

    PERMUTE = 0
    ALL_GATHER = 1
    ALL_TO_ALL = 2


@dataclasses.dataclass(frozen=True)
class Half:
    """One half of an exchange that outlives its program (`halves.py`).

    Attributes:
      is_finish: Whether it is the finish, not the start.
      name: Name of the exchange.
    """

    is_finish: bool
    name: str

    @property
    def verb(self) -> str:
        """Name of its function in the API."""
        return "finish" if self.is_finish else "start"

    @property
    def key(self) -> int:
        """Number of the exchange in the engine, above 0."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") + 1


@dataclasses.dataclass(frozen=True)
class Call:
    """The attributes of the engine's call (`xla_plugin/ffi/handlers.cc`), in their order.

    Attributes:
      session: Key of the live engine.
      plan: Fingerprint of the plan.
      index: Place in the plan.
    """

    session: int
    plan: int = 0
    index: int = 0

    @property
    def text(self) -> str:
        """The attributes as an MLIR dictionary."""
        fields = dataclasses.asdict(self).items()
        return "{" + ", ".join(f"{name} = {value} : i64" for name, value in fields) + "}"


@dataclasses.dataclass(frozen=True)
class Movement:
    """The movement of data that the engine prepares when the plan is registered.

    The engine's `PlannedExchange` has the same fields in the same order.

    Attributes:
      kind: Pattern of data movement.
      ranks: Ranks of the groups one after the other; -1 where a group is smaller than the largest.
      group_size: Number of ranks in each group.
      deadline_ms: Longest wait of the exchange for its peers; 0 is the session's default.
      skips_own: On GPUs, whether the rank's own row of the result is undefined.
      part_bytes: On GPUs, size of the parts that the exchange is split into; 0: it is not split.
      handle: Key of a half (`Half.key`); 0: the exchange is whole.
      is_finish: Whether the half is a finish.
      handle_bytes: Size of the operand of a half.
    """

    kind: ExchangeKind
    ranks: tuple[int, ...]
    group_size: int
    deadline_ms: int = 0
    skips_own: bool = False
    part_bytes: int = 0
    handle: int = 0
    is_finish: bool = False
    handle_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """An exchange without the HLO that carries it.

    Attributes:
      call: Attributes of the engine's call; `plan` and `index` are known when the plan is made.
      movement: The movement of its data.
      collective: Opcode, reducer and dimension of the collective.
      algorithm: "flat", "hierarchical" or, from each source to its targets, "direct".
      num_operands: Number of operands of the collective.
      shapes: Shapes of the exchange's operands, with commas between them.
      groups: Ranks that exchange with each other; of a permute, pairs of source and target.
      digest: Digest of the identities of the collectives that share the exchange.
      source: The user's operation and source line.
      note: Reason for the algorithm, or "".
      num_bytes: Largest number of bytes that a rank sends to ranks on other islands.
      num_collectives: Number of operands of the user's collectives that share the exchange.
      is_pipelined: Whether the collective was moved to a neighbouring iteration of a loop.
      wire: Codec and block in which its data travels, or "".
      plain_bytes: With `wire`, `num_bytes` without it.
      place: Program and control flow around the exchange; "" before the plan is made.
      tie: Number that distinguishes the exchange from look-alikes, or "".
    """

    call: Call
    movement: Movement
    collective: str
    algorithm: str
    num_operands: int
    shapes: str
    groups: Groups
    digest: str
    source: str
    note: str
    num_bytes: int
    num_collectives: int
    is_pipelined: bool = False
    wire: str = ""
    plain_bytes: int = 0
    place: str = ""
    tie: str = ""

    @property
    def kind(self) -> str:
        """The name of the `ExchangeKind`, in lower case."""
        return self.movement.kind.name.lower()

    @property
    def index(self) -> int:
        """Place in the plan."""
        return self.call.index

    @property
    def local_line(self) -> str:
        """The line without the place in the program."""
        words = [self.kind, self.collective]
        words += [] if self.algorithm == DIRECT else [self.algorithm]
        words += [f"of {self.num_operands}"] if self.num_operands > 1 else []
        words += [self.wire] if self.wire else []
        words += [self.shapes, groups_lib.to_text(self.groups), f"@{self.digest}"]
        return " ".join(words)

    @property
    def line(self) -> str:
        """Text of the plan that must be equal on all ranks."""
        tie = f" #{self.tie}" if self.tie else ""
        return f"{self.place} {self.local_line}{tie}"

    def in_plan(self, plan: int, index: int) -> Self:
        """The exchange at its place in the plan of this fingerprint."""
        return dataclasses.replace(
            self, call=dataclasses.replace(self.call, plan=plan, index=index)
        )

    def to_json(self) -> str:
        """The record as a JSON object; the value of a frontend attribute."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that `to_json` wrote."""
        fields = json.loads(text)
        call = Call(**fields.pop("call"))
        moved = fields.pop("movement")
        moved |= {"kind": ExchangeKind(moved["kind"]), "ranks": tuple(moved["ranks"])}
        groups = tuple(map(tuple, fields.pop("groups")))
        return cls(call=call, movement=Movement(**moved), groups=groups, **fields)
