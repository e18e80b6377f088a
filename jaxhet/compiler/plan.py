"""The plan: the ordered list of a program's exchanges, and its fingerprint."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence

from jaxhet._errors import JaxhetError, UsageError
from jaxhet.compiler import carrier, collectives, hlo, order
from jaxhet.compiler.carrier import Exchange
from jaxhet.compiler.exchange import ExchangeSpec, Movement
from jaxhet.compiler.options import OVERLAP_LIMIT

# Frontend attribute of a module: the digest of its jaxpr (`jaxhet/_traced/jaxprs.py`).
PROGRAM_ATTRIBUTE = "jaxhet_program"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A program's exchanges.

    Attributes:
      exchanges: In the order of their starts.
      program: The digest of the program's jaxpr.
    """

    exchanges: tuple[ExchangeSpec, ...]
    program: str

    @property
    def text(self) -> str:
        """A line per exchange: what must be equal on all ranks, a tab, the user's op and source."""
        return "".join(f"{e.line}\t{e.source}\n" for e in self.exchanges)

    @property
    def movements(self) -> list[Movement]:
        """The movement of each exchange, for the engine."""
        return [e.movement for e in self.exchanges]

    @property
    def fingerprint(self) -> int:
        """63 bits of a hash of program and lines; peers exchange only between equal ones."""
        return fingerprint(self.program, [e.line for e in self.exchanges])


def fingerprint(program: str, lines: Sequence[str]) -> int:
    """The fingerprint of a plan with these lines, for the program of this digest."""
    digest = hashlib.blake2b("\n".join([program, *lines]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make(module: hlo.Module, exchanges: Sequence[Exchange]) -> None:
    """Orders the exchanges of a module, chains their starts, and writes the plan into them."""
    for computation in module.computations.values():
        computation.sort()
    in_order = _Order(module, exchanges)
    placed = list(in_order.placed(module.entry, module.proto.name))
    plan = fingerprint(_digest_of_jaxpr(module), [spec.line for _, spec in placed])
    for index, (exchange, spec) in enumerate(placed):
        carrier.finish(exchange, spec.in_plan(plan, index))
    in_order.chain()
    if any(e.done is not None for e in exchanges):  # on CPUs XLA has transformed loops already
        in_order.keep_loops()


def collect(module: hlo.Module) -> Plan | None:
    """The plan that PRE wrote into a module, or None if it holds no exchange.

    Raises:
      JaxhetError: XLA dropped, copied or changed an exchange between the passes.
    """
    starts = (i for c in module.computations.values() for i in c.instructions)
    specs = sorted(
        (carrier.read(i) for i in starts if carrier.is_start(i)), key=lambda spec: spec.index
    )
    if not specs:
        return None
    plan = Plan(tuple(specs), _digest_of_jaxpr(module))
    indexes = [spec.index for spec in specs]
    fingerprints = {spec.call.plan for spec in specs}
    if indexes != list(range(len(specs))) or fingerprints != {plan.fingerprint}:
        raise JaxhetError(
            f"{module.proto.name}: XLA changed the exchanges after they were planned (found numbers"
            f" {indexes} of plans {sorted(fingerprints)}); report this with a dump (JAXHET_DUMP)"
        )
    return plan


def check_program(module: hlo.Module) -> None:
    """Checks that the program of a module is known.

    Raises:
      UsageError: JAX did not lower it in this process.
    """
    if not _digest_of_jaxpr(module):
        raise UsageError(
            f"{module.proto.name} has collectives that cross islands, and JAX did not lower it in"
            " this process: nothing tells whether the other islands run the same program. Compile"
            " it by jax.jit, or by jax.export and a call inside jax.jit, after"
            " jaxhet.initialize()"
        )


def _digest_of_jaxpr(module: hlo.Module) -> str:
    return module.proto.frontend_attributes.map.get(PROGRAM_ATTRIBUTE, "")


class _Order:
    """Puts the exchanges of a module in order.

    The steps of a computation are its exchanges and the instructions that call a computation with
    steps. Computations are sorted.
    """

    def __init__(self, module: hlo.Module, exchanges: Sequence[Exchange]):
        self._module = module
        self._exchanges = {e.start.id: e for e in exchanges}
        self._steps: dict[int, set[int]] = {}
        # The cache of a decorator would be the class's, and keep every module that is compiled.
        self.ordered = functools.cache(self._ordered)
        for e in exchanges:
            self._add_step(e.computation, e.start)

    def _add_step(self, computation: hlo.Computation, step: hlo.Instruction) -> None:
        steps = self._steps.setdefault(computation.id, set())
        if step.id not in steps:
            steps.add(step.id)
            for call in self._module.callers.get(computation.id, ()):
                self._add_step(call.computation, call.instruction)

    def _ordered(self, computation: hlo.Computation) -> list[tuple[hlo.Instruction, str]]:
        """Steps of a computation in order, each with a text that tells it from equal ones."""
        ids = self._steps[computation.id]
        steps = {}
        for i in ids:
            line, key = self._line(computation[i]), self._key(computation[i])
            if (e := self._exchanges.get(i)) is not None:
                steps[i] = order.Step(line, key, e.use, e.is_gather, e.is_early)
            else:
                steps[i] = order.Step(line, key, inside=self._inside(computation[i]))
        return order.ordered(computation, steps)

    def _key(self, step: hlo.Instruction) -> order.Key:
        """Place in the program; control flow has the place of its first exchange."""
        if step.id in self._exchanges:
            return self._exchanges[step.id].key
        return min(self._key(i) for c in self._callees(step) for i, _ in self.ordered(c))

    def _inside(self, step: hlo.Instruction) -> tuple[int, ...]:
        """The numbers with which the keys of all exchanges in a loop or branch begin."""
        numbers = [
            self._exchanges[i.id].key[1] if i.id in self._exchanges else self._inside(i)
            for c in self._callees(step)
            for i, _ in self.ordered(c)
        ]
        same = itertools.takewhile(lambda n: len(set(n)) == 1, zip(*numbers, strict=False))
        return tuple(n[0] for n in same)

    def _line(self, step: hlo.Instruction) -> str:
        if step.id in self._exchanges:
            return self._exchanges[step.id].spec.local_line
        nested = (
            f"{self._line(i)}{tie}" for c in self._callees(step) for i, tie in self.ordered(c)
        )
        return "\n".join((step.opcode, *nested))

    def _callees(self, step: hlo.Instruction) -> list[hlo.Computation]:
        ids = (i for i in step.called_computation_ids if i in self._steps)
        return [self._module.computations[i] for i in ids]

    def placed(
        self, computation: hlo.Computation, path: str
    ) -> Iterator[tuple[Exchange, ExchangeSpec]]:
        """The exchanges of a computation and those it calls, each with its place in the program."""
        numbers: dict[str, int] = {}
        for step, tie in self.ordered(computation):
            if (exchange := self._exchanges.get(step.id)) is not None:
                yield exchange, dataclasses.replace(exchange.spec, place=path, tie=tie)
                continue
            suffix = f" #{tie}" if tie else ""
            number = numbers[step.opcode] = numbers.get(step.opcode, -1) + 1
            for callee in self._callees(step):
                role = collectives.role(step, callee.id)
                yield from self.placed(callee, f"{path}/{step.opcode}{number}.{role}{suffix}")

    def keep_loops(self) -> None:
        """Keeps XLA from copying loops with exchanges.

        To move an all-reduce of a sum over all iterations behind the loop, XLA would make a second
        loop. To move a stored reduce-scatter to the next iteration, it would copy the first one.
        """
        for computation_id in self._steps:
            calls = self._module.callers.get(computation_id, ())
            if all(call.instruction.opcode != "while" for call in calls):
                continue
            body = self._module.computations[computation_id]
            moved = ("all-reduce", "reduce-scatter")
            for instruction in [i for i in body.instructions if i.opcode in moved]:
                body.hide(instruction)

    def chain(self) -> None:
        """Makes each step wait for the start of the one before.

        Dones are chained in the same way. XLA's scheduler works backwards and limits the number of
        exchanges in flight. Without the chain it could choose dones whose starts it may not place.
        Local collectives before and after exchanges are chained too. XLA would merge them into one,
        and all exchanges would wait for it. On GPUs barriers hide the gathers: if a result is
        converted, XLA would add a gather of the converted value, and keep the chained one unused.

        The scheduler counts the exchanges of a loop or call as in flight all the time. So the
        exchanges before a loop are done when it begins, except for the last one if the limit allows
        that.
        """
        for computation_id in self._steps:
            computation = self._module.computations[computation_id]
            steps = [step for step, _ in self.ordered(computation)]
            exchanges = [self._exchanges[s.id] for s in steps if s.id in self._exchanges]
            dones = [e.done for e in exchanges if e.done is not None]
            scatters = [i for e in exchanges for i in e.scatters]
            gathers = [i for e in exchanges for i in e.gathers]
            for sequence in (steps, dones, scatters, gathers):
                for first, second in itertools.pairwise(sequence):
                    computation.add_control_predecessor(second, first)
            for gather in gathers if dones else ():
                computation.hide(gather)
            before: list[hlo.Instruction] = []
            for step in steps:
                if step.id in self._exchanges:
                    done = self._exchanges[step.id].done
                    before += [] if done is None else [done]
                    continue
                may_last = self._num_collectives(step) < OVERLAP_LIMIT
                if finished := before[:-1] if may_last else before:
                    computation.add_control_predecessor(step, finished[-1])
                before = before[-1:] if may_last else []

    def _num_collectives(self, step: hlo.Instruction) -> int:
        """Number of collectives and exchanges in the computations that a step calls."""
        called = [self._module.computations[i] for i in step.called_computation_ids]
        return sum(
            (i.opcode in hlo.COLLECTIVES) + self._num_collectives(i)
            for c in called
            for i in c.instructions
        )
