"""Applications of JAX from the package index train over islands with the losses of plain JAX.

Each is installed, unmodified, in an environment of its own below `.cache/programs`. Each prints a
line per mesh for the table in docs/guides/applications.md.
"""

import itertools
import json
import pathlib
import re
import statistics
from collections.abc import Sequence

import pytest

from tests.support import applications, published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_ENV = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "HF_HUB_OFFLINE": "1"}
_MESHES = ("data", "fsdp", "tensor", "expert", "pipeline", "slices")
_TOLERANCE = 2e-6
_TURNS = 2  # runs of each world, in alternation, so that both meet the same noise


def _compare(name: str, mine: Sequence[float], world: Sequence[float]) -> float:
    """The largest relative difference of the losses."""
    assert len(mine) == len(world) > 0
    assert len(set(world)) > len(world) // 2  # it learns something
    difference = max(abs(a - b) / abs(b) for a, b in zip(mine, world, strict=True))
    assert difference < _TOLERANCE, (name, mine, world)
    return difference


def _ratios(mine: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> str:
    """How many times as fast as plain JAX: the fastest step and the median of all turns' steps."""
    own, others = list(itertools.chain(*mine)), list(itertools.chain(*plain))
    medians = statistics.median(others) / statistics.median(own)
    return f"{min(others) / min(own):.2f} {medians:.2f}"


def _maxtext(folder: pathlib.Path, case: str, process: int = 0) -> tuple[list[float], list[float]]:
    """Losses by step, and the times of steps after the first two."""
    lines = (folder / f"{case}.{process}").read_text().splitlines()
    steps = {line["step"]: line for line in map(json.loads, lines)}
    times = [line["perf/step_time_seconds"] for step, line in steps.items() if step > 1]
    return [line["learning/loss"] for line in steps.values()], times


def test_maxtext_has_the_losses_of_plain_jax_on_all_meshes(tmp_path: pathlib.Path) -> None:
    """Plain JAX continues the islands' checkpoint as they do."""
    python = applications.environment("maxtext", "maxtext[tpu]==0.2.5")
    islands, plain = (tmp_path / name for name in ("islands", "plain"))
    run = published.Run(2, python=python, timeout_s=1700)
    program = str(published.HERE / "maxtext_meshes.py")
    cases = (*_MESHES, "saved", "restored")
    again = [tmp_path / f"again{turn}" for turn in range(2 * (_TURNS - 1))]
    for place, folder in enumerate((islands, plain, *again)):
        folder.mkdir()
        world = published.in_plain_world if place % 2 else published.over_islands
        names = cases if place < 2 else _MESHES
        world([program, str(folder), str(islands), *names], _ENV, run)
    for case in cases:
        (mine, _), (world_losses, _) = (_maxtext(folder, case) for folder in (islands, plain))
        assert _maxtext(islands, case, 1)[0] == mine
        print("maxtext", case, f"{_compare(case, mine, world_losses):.1e}", end=" ")
        folders = (islands, plain, *(again if case in _MESHES else ()))
        times = [_maxtext(folder, case)[1] for folder in folders]
        print(_ratios(times[::2], times[1::2]))
    uninterrupted = _maxtext(plain, "fsdp")[0]
    for folder in (islands, plain):
        continued = _maxtext(folder, "restored")[0]
        _compare("restored", continued, uninterrupted[-len(continued) :])


def _losses(text: str) -> tuple[list[float], list[float]]:
    """Losses by step, and the times between steps."""
    lines = re.findall(r"loss (\d+) (\S+) (\S+)$", text, re.MULTILINE)
    found = {int(step): (float(loss), float(time)) for step, loss, time in reversed(lines)}
    losses, times = zip(*(found[step] for step in sorted(found)), strict=True)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return list(losses), steps


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("tunix", ["google-tunix==0.1.7"]),
        ("kauldron", ["kauldron==1.4.4"]),
        ("levanter", ["marin-levanter==0.2.227.dev40316220070", "--prerelease=allow"]),
    ],
)
def test_trainer_has_the_losses_of_plain_jax(
    name: str, requirements: list[str], tmp_path: pathlib.Path
) -> None:
    python = applications.environment(name, *requirements)
    run = published.Run(2, python=python, folder=tmp_path)  # Levanter writes logs there
    program = str(published.HERE / f"{name}_program.py")
    texts = [
        world([program, str(tmp_path / f"{turn}{world.__name__}")], _ENV, run)
        for turn in range(_TURNS)
        for world in (published.over_islands, published.in_plain_world)
    ]
    results = [[_losses(text) for text in of_run] for of_run in texts]
    assert [len(losses) for of_run in results for losses, _ in of_run] == [10] * 4 * _TURNS
    world = results[1][0][0]
    difference = max(_compare(name, losses, world) for of_run in results for losses, _ in of_run)
    times = [of_run[0][1] for of_run in results]
    print(name, f"{difference:.1e}", _ratios(times[::2], times[1::2]))
