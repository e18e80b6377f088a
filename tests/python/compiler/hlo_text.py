"""Modules from HLO text and back, without a backend."""

import io
import random
import re

from filecheck import options as file_check
from filecheck import parser
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from jaxhet.compiler import PROGRAM_ATTRIBUTE, Job, Options, Plan, bridge, carrier, decompose, hlo
from jaxhet.compiler import proto as pb
from jaxhet.compiler.exchange import ExchangeSpec

SUM = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""


def job(*islands: int, platform: str = "cpu") -> Job:
    """Rank r has device 10 * r, so that device ids, logical ids and ranks differ."""
    device_ids = tuple(10 * rank for rank in range(len(islands)))
    return Job(device_ids, islands, platform, session=7)  # type: ignore[arg-type]


def parsed(text: str) -> bytes:
    """A whole module, as XLA reads it."""
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def module(text: str, ranks: list[int], program: str = "0123") -> bytes:
    """Parses text; `ranks` is its device assignment.

    `program` is the digest of the jaxpr that it was lowered from.
    """
    proto = pb.HloModuleProto.FromString(parsed(f"HloModule test\n{text}"))
    proto.frontend_attributes.map[PROGRAM_ATTRIBUTE] = program
    assignment = proto.device_assignment
    assignment.replica_count, assignment.computation_count = 1, len(ranks)
    for rank in ranks:
        assignment.computation_devices.add(replica_device_ids=[10 * rank])
    return proto.SerializeToString()


def entry(body: str, before: str = SUM) -> str:
    """Text with one entry computation."""
    return f"{before}\nENTRY main {{\n{body}\n}}\n"


def to_text(data: bytes) -> str:
    """XLA's own print; fails if XLA can't read the module."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(data).to_string()


def all_reduce(
    name: str, operand: str, groups: str = "{{0,1}}", shape: str = "f32[4]", path: str = ""
) -> str:
    """An all-reduce over logical ids; `path` is the equation that it belongs to."""
    return (
        f"{name} = {shape} all-reduce({operand}), channel_id=1, replica_groups={groups},"
        f" use_global_device_ids=true, to_apply=sum{named(path)}"
    )


def named(path: str) -> str:
    """The end of an instruction's text that says which equation it belongs to."""
    return f', metadata={{op_name="{path}"}}' if path else ""


def of_two(body: str, before: str = SUM) -> bytes:
    """A module of an entry computation on ranks 0 and 1."""
    return module(entry(body, before), [0, 1])


def after_pre(data: bytes, its_job: Job | None = None, options: Options | None = None) -> bytes:
    """A module after PRE, which must change it; by default, each of two ranks is an island."""
    result = decompose(data, its_job or job(0, 1), options or Options())
    assert result is not None
    return result


def bridged(
    data: bytes, its_job: Job | None = None, options: Options | None = None
) -> tuple[bytes, Plan]:
    """A module after both passes, and its plan; by default, each of two ranks is an island."""
    its_job, options = its_job or job(0, 1), options or Options()
    result = bridge(after_pre(data, its_job, options), its_job)
    assert result is not None
    return result


def decomposed(
    body: str, its_job: Job | None = None, options: Options | None = None, before: str = SUM
) -> str:
    """The text of an entry computation after PRE, then its plan; by default on two ranks.

    Each of them is an island. A line of the plan ends with bytes and note.
    """
    its_job = its_job or job(0, 1)
    data = module(entry(body, before), list(range(len(its_job.islands))))
    result = after_pre(data, its_job, options)
    plan = (f"plan: {s.line}; {s.num_bytes} bytes; {s.note}" for s in planned(result))
    return "\n".join([to_text(_without_records(result)), *plan, ""])


def planned(decomposed: bytes) -> list[ExchangeSpec]:
    """The exchanges of a module after PRE, by index."""
    computations = hlo.Module(decomposed).computations.values()
    starts = (i for c in computations for i in c.instructions if carrier.is_start(i))
    return sorted(map(carrier.read, starts), key=lambda spec: spec.index)


def _without_records(decomposed: bytes) -> bytes:
    proto = pb.HloModuleProto.FromString(decomposed)
    for instruction in (i for c in proto.computations for i in c.instructions):
        instruction.ClearField("frontend_attributes")
    return proto.SerializeToString()


def check(text: str, checks: str) -> None:
    """Compares text with FileCheck lines (llvm.org/docs/CommandGuide/FileCheck.html)."""
    options = file_check.Options(match_filename="checks", input_file="text")
    lines = parser.Parser(options, io.StringIO(checks), *parser.pattern_for_opts(options))
    matcher = Matcher(options, FInput("text", text), lines)
    matcher.stderr = io.StringIO()
    assert matcher.run() == 0, f"{matcher.stderr.getvalue()}\n{text}"


def opcodes(text: str) -> list[str]:
    """Instructions of the entry computation."""
    main = text.split("\nENTRY", 1)[1]
    return re.findall(r" = (?:\(.*?\)|\S+) ([a-z\-]+)\(", main)


def shuffled(data: bytes, seed: int) -> bytes:
    """The same program with other names and ids, and its instructions in another valid order."""
    rng = random.Random(seed)
    module = hlo.Module(data)
    for computation in module.computations.values():
        old = list(computation.proto.instructions)
        new_ids = [(computation.id << 32) + place for place in range(len(old))]
        rng.shuffle(new_ids)
        new_id = dict(zip((i.id for i in old), new_ids, strict=True))
        for i in old:
            i.id, i.name = new_id[i.id], f"{i.opcode}.{rng.randrange(10**6)}"
            i.operand_ids[:] = [new_id[o] for o in i.operand_ids]
        rng.shuffle(old)
        _set_instructions(computation.proto, old)
        computation.proto.root_id = new_id[computation.proto.root_id]
        in_order = hlo.Computation(module, computation.proto)
        in_order.sort()
        _set_instructions(computation.proto, in_order.instructions)
    return module.proto.SerializeToString()


def _set_instructions(proto: pb.HloComputationProto, new: list[hlo.Instruction]) -> None:
    del proto.instructions[:]
    proto.instructions.extend(new)


_FORMS = ("bitcast", "copy", "reshape")


def feeding(data: bytes, its_job: Job, options: Options | None = None) -> list[list[str]]:
    """Arrays that each exchange moves, by index, and by place where several lie in its operand.

    An array is what gives it: "parameter" or "exchange" and its number, else the end of the path in
    the metadata, else the opcode.
    """
    main = hlo.Module(after_pre(data, its_job, options)).entry
    starts = [i for i in main.instructions if carrier.is_start(i)]
    starts.sort(key=carrier.index_of_call)
    return [[name for x in main.operands(start) for name in _sources(main, x)] for start in starts]


def _sources(main: hlo.Computation, x: hlo.Instruction) -> list[str]:
    operands = main.operands(x)
    if carrier.is_start(x):
        return [f"exchange {carrier.index_of_call(x)}"]
    if x.opcode == "parameter":
        return [f"parameter {x.parameter_number}"]
    if x.opcode == "get-tuple-element" and operands[0].opcode == "opt-barrier":
        (pair,) = main.operands(operands[0])
        return _sources(main, main.operands(pair)[x.tuple_index])
    if not x.name.startswith("jaxhet.") and x.opcode not in _FORMS:
        return [x.metadata.op_name.rpartition("/")[2] or x.opcode]
    names = [name for operand in operands for name in _sources(main, operand)]
    if x.opcode == "concatenate":
        return names
    received = [name for name in names if name.startswith("exchange")]
    return list(dict.fromkeys(received)) or names  # a rank adds its own part to the received ones
