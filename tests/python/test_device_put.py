"""How shards move between islands: every device gets its shard, and links carry it once."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from jaxhet._device_put import Box, Round, plan

SHAPE = (12, 6)


def _layouts(devices: list[int]) -> Iterator[dict[int, Box]]:
    """Each device's part of an array with 1, 2, 3, … parts along its dimensions."""
    for rows, columns in itertools.product((1, 2, 3, 4, 6), (1, 2, 3)):
        parts = rows * columns
        if len(devices) % parts == 0:
            height, width = SHAPE[0] // rows, SHAPE[1] // columns
            yield {
                device: (
                    (i // columns * height, (i // columns + 1) * height),
                    (i % columns * width, (i % columns + 1) * width),
                )
                for device, i in zip(devices, itertools.cycle(range(parts)), strict=False)
            }


def _cut(value: np.ndarray, box: Box, origin: Box = ((0, 0), (0, 0))) -> np.ndarray:
    return value[tuple(slice(b - o[0], e - o[0]) for (b, e), o in zip(box, origin, strict=True))]


def _carried_out(rounds: list[Round], sources: dict[int, Box], targets: dict[int, Box]) -> None:
    """Checks that the devices get what they should."""
    value = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    held = {device: _cut(value, box) for device, box in sources.items()}
    result = {device: np.full_like(_cut(value, box), -1) for device, box in targets.items()}
    for each in rounds:
        moves = each.moves
        assert len({m.source for m in moves}) == len({m.target for m in moves}) == len(moves)
        assert len({tuple(end - begin for begin, end in m.piece) for m in moves}) == 1
        values, boxes = (result, targets) if each.are_copies else (held, sources)
        sent = [_cut(values[m.source], m.piece, boxes[m.source]).copy() for m in moves]
        for m, piece in zip(moves, sent, strict=True):
            _cut(result[m.target], m.piece, targets[m.target])[:] = piece
    for device, box in targets.items():
        np.testing.assert_array_equal(result[device], _cut(value, box))


@pytest.mark.parametrize("seed", range(20))
def test_every_device_gets_its_shard_and_it_enters_an_island_once(seed: int):
    rng = random.Random(seed)
    islands = {device: rng.randrange(3) for device in range(24)}
    one, other = (rng.sample(range(24), rng.choice((1, 2, 6, 12))) for _ in range(2))
    for sources, targets in itertools.product(_layouts(one), _layouts(other)):
        rounds = plan(sources, targets, islands)
        _carried_out(rounds, sources, targets)
        crossing = sum(
            np.prod([end - begin for begin, end in m.piece])
            for each in rounds
            for m in each.moves
            if islands[m.source] != islands[m.target]
        )
        entered = {(targets[d], islands[d]) for d in targets}
        most = sum(np.prod([e - b for b, e in box]) for box, _ in entered)
        assert crossing <= most


def _pairs(rounds: list[Round]) -> list[set[tuple[int, int]]]:
    """Senders and receivers of each round."""
    return [{(m.source, m.target) for m in each.moves} for each in rounds]


def test_replicas_are_copied_inside_an_island_in_few_steps():
    whole: Box = ((0, 4),)
    first, *copies = plan(
        {0: whole}, dict.fromkeys(range(8, 16), whole), {0: 0} | dict.fromkeys(range(8, 16), 1)
    )
    assert _pairs([first]) == [{(0, 8)}]
    assert all(each.are_copies for each in copies)
    assert [len(each.moves) for each in copies] == [1, 2, 4]


def test_senders_share_the_work_and_a_device_that_has_its_shard_keeps_it():
    whole, low, high = ((0, 4),), ((0, 2),), ((2, 4),)
    islands = {0: 0, 1: 0, 2: 1, 3: 1}
    assert _pairs(plan({0: whole, 1: whole}, {2: low, 3: high}, islands)) == [{(0, 2), (1, 3)}]
    assert _pairs(plan({0: whole, 2: whole}, {2: low}, islands)) == [{(2, 2)}]
