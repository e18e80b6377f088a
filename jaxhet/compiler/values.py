"""Digests of values, by the instructions that compute them."""

import hashlib
from collections.abc import Mapping, Sequence

from jaxhet.compiler import hlo

# Instructions that can give another value when they run again.
_IMPURE = frozenset(
    [
        "custom-call",
        "infeed",
        "outfeed",
        "recv",
        "recv-done",
        "rng",
        "rng-get-and-update-state",
        "send",
        "send-done",
    ]
)


def code(computation: hlo.Computation) -> Mapping[int, bytes]:
    """For each instruction id, a digest of all instructions that the value depends on.

    Modules in which the same instructions give a value have the same digest for it, whatever the
    names, ids and order of the instructions are, and whatever kernels a compiler chose for them.
    The computation is sorted.
    """
    found = _digests(computation, "backend_config", {})
    return {i: digest for i, (digest, _) in found.items()}


def certain(computation: hlo.Computation) -> Mapping[int, bytes]:
    """Instruction id to a digest that two arrays share only if they are certain to be equal.

    Unlike `code`, the digest includes the kernels. Arrays that depend on an impure instruction,
    such as a random number, have none.
    """
    found = _digests(computation, "", {})
    return {i: digest for i, (digest, is_pure) in found.items() if is_pure}


_Digest = tuple[bytes, bool]  # and whether all instructions are pure


def _digests(
    computation: hlo.Computation, left_out: str, roots: dict[int, _Digest]
) -> dict[int, _Digest]:
    """Digest of each instruction, by id. Adds the digests of called computations to `roots`."""
    found: dict[int, _Digest] = {}
    for i in computation.instructions:
        fields = ["channel_id"]
        if left_out and i.opcode != "custom-call":
            fields.append(left_out)
        digest = hashlib.blake2b(_without_names(i, fields), digest_size=16)
        is_pure = i.opcode not in _IMPURE
        for called in computation.called(i):
            if called.id not in roots:
                called.sort()
                roots[called.id] = _digests(called, left_out, roots)[called.root.id]
        inputs = [found[operand] for operand in i.operand_ids]
        for part, is_part_pure in [
            *inputs,
            *(roots[called] for called in i.called_computation_ids),
        ]:
            digest.update(part)
            is_pure &= is_part_pure
        found[i.id] = digest.digest(), is_pure
    return found


def _without_names(instruction: hlo.Instruction, fields: Sequence[str]) -> bytes:
    """Serialized instruction without names, ids and `fields`: equal for equal operations."""
    copy = hlo.Instruction()
    copy.CopyFrom(instruction)
    for field in ("id", "name", "metadata", "operand_ids", "control_predecessor_ids", *fields):
        copy.ClearField(field)
    copy.called_computation_ids[:] = [0] * len(copy.called_computation_ids)
    return copy.SerializeToString(deterministic=True)
