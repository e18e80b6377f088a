"""The choice of meshes and shares from made-up times of islands, links and memory."""

import dataclasses

import numpy as np

from models.configs import CONFIGS
from models.extras.candidates import Alone, Candidate, Suggestion, candidates, ranked
from models.extras.shares import Cost

FOUR = dataclasses.replace(CONFIGS["tiny"], layers=4)
# The second island is a third as fast: 1 s against 3 s for a microbatch of 1 s a layer.
UNLIKE = Alone([Cost(4.0, 0.5), Cost(12.0, 1.5)], np.array([[1, 0, 0], [3, 0, 0]], np.float32))


def of(inner: str, devices: int, alone: Alone = UNLIKE) -> dict[str, Candidate]:
    return {c.words: c for c in candidates(FOUR, inner, devices, 4, alone)}


def test_faster_island_computes_more_microbatches_and_layers():
    found = of("fsdp", 2)
    seconds = {words: candidate.compute for words, candidate in found.items()}
    stages = "--mesh stage=2,fsdp=2 --accumulate 1 --microbatches 8 --stages 3,1"
    assert seconds == {
        "--mesh data=2,fsdp=2 --accumulate 4 --balance 6,2": 25.5,  # 6 × 4 + 0.5, 2 × 12 + 1.5
        "--mesh data=2,fsdp=2 --accumulate 4 --balance 4,4": 49.5,  # the slow one: 4 × 12 + 1.5
        "--mesh fsdp=4 --accumulate 4": 49.5,
        # Ten turns of the slowest stage (3 s), and half of the rest.
        f"{stages} --pipeline gpipe --remat dots": 10 * 3 + 0.75,
        # The first stage needs 4/3 of the time, the last one does not.
        f"{stages} --pipeline 1f1b --remat dots": 10 * 4 + 0.75,
    }


def test_devices_along_data_have_shares_of_their_own():
    assert "--mesh data=4 --accumulate 4 --balance 6,6,2,2" in of("data", 2)
    equal = Alone([Cost(1.0, 0.0)] * 2, None)  # and the model is too small for stages
    assert list(of("data", 1, equal)) == [
        "--mesh data=2 --accumulate 4 --balance 4,4",
        "--mesh fsdp=2,data=1 --accumulate 4",
    ]


def test_link_and_memory_decide_between_candidates():
    data, stage = Candidate({"mesh": "data=2"}, 25.5), Candidate({"mesh": "stage=2"}, 30.75)

    def first(exchange: float, room: int | None) -> str:
        found = [Suggestion(data, exchange, 900), Suggestion(stage, 0.1, 500)]
        return ranked(found, room)[0].candidate.options["mesh"]

    assert first(exchange=1, room=None) == "data=2"
    assert first(exchange=6, room=None) == "stage=2"  # gradients on a thin link
    assert first(exchange=1, room=800) == "stage=2"
    assert first(exchange=1, room=900) == "data=2"
