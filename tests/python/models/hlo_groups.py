"""Reads the collectives of a compiled module and the groups of devices that they join."""

import re
from collections.abc import Iterator

import numpy as np

_COLLECTIVES = (
    "all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute"
    "|collective-broadcast"
)
_INSTRUCTION = re.compile(rf" ({_COLLECTIVES})(?:-start)?\((.*)")
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")


def collectives(hlo: str) -> Iterator[tuple[str, list[list[int]]]]:
    """Each collective's name and groups (a permute's pairs), as positions of devices."""
    for name, rest in _INSTRUCTION.findall(hlo):
        yield name, groups(rest)


def groups(text: str) -> list[list[int]]:
    """The groups in an instruction's text, in any of HLO's three forms; ValueError for another."""
    if match := _LISTS.search(text):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1])]
    if match := _IOTA.search(text):
        shape, source, order = (_numbers(part or "") for part in match.groups())
        ids = np.arange(np.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape).tolist()
    if match := _MESH.search(text):
        return _mesh_groups(match[1], match[2])
    raise ValueError(f"no groups of a known form in: {text}")


def _mesh_groups(axes: str, joined: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    inner = re.findall(r"'(\w+)'", joined)
    outer = [name for name in sizes if name not in inner]
    ids = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
    order = [list(sizes).index(name) for name in outer + inner]
    rows = ids.transpose(order).reshape(-1, int(np.prod([sizes[name] for name in inner])))
    return [[int(position) for position in row] for row in rows]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
