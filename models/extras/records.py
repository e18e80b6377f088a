"""Records of a run: metrics and digests as JSON lines, and a plot of the loss.

`metrics.jsonl`, from process 0, has a line per step. `digests-<process>.jsonl`, from every process,
has a line per logged step and local device: the SHA-256 of the device's piece of every parameter.
Pieces of a parameter with equal `index` are replicas, and an outsider can compare their bits.
"""

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.sharding import path_name

METRICS = "metrics.jsonl"
PLOT = "loss.png"


class Journal:
    """A file of JSON lines with a `step` each, for a run that continues after `start` steps.

    Lines of later steps (a killed run's, after its last checkpoint) are dropped first.
    """

    def __init__(self, path: Path, start: int) -> None:
        kept = [row for row in read_rows(path) if row["step"] <= start] if start else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._path = path

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows; they are in the file when this returns."""
        with self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, none if it is missing; a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a - b| / |b| of each pair; NaN if one is."""
    return [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]


def digest_rows(step: int, params: Any) -> list[dict[str, Any]]:
    """A row per local device: index and SHA-256 of its piece of each parameter. Host work only."""
    rows: dict[int, dict[str, list[str]]] = defaultdict(dict)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        for shard in array.addressable_shards:
            digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()
            rows[shard.device.id][path_name(path)] = [_bounds(shard.index, array.shape), digest]
    return [
        {"step": step, "process": jax.process_index(), "device": device, "digests": digests}
        for device, digests in sorted(rows.items())
    ]


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Comparison of the pieces of a run's parameters.

    A piece is identified by a step, a parameter and an index. `compared` counts pieces with more
    than one copy, `fewest` is the smallest number of copies of such a piece, and `differences`
    names the pieces whose copies differ.
    """

    steps: int
    devices: int
    compared: int
    fewest: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether there were replicas to compare and all of them had equal bits."""
        return self.compared > 0 and not self.differences

    def complete(self, devices: int, copies: int) -> bool:
        """Whether `devices` devices left digests, and `copies` of them or more of every piece."""
        return self.devices == devices and self.fewest >= copies


def compare_replicas(run_dir: Path) -> Replicas:
    """Compares all replicas of all parameters at all logged steps, over every process of a run."""
    groups: dict[tuple[int, str, str], dict[int, str]] = defaultdict(dict)
    for step, device, name, index, digest in _pieces(run_dir):
        groups[step, name, index][device] = digest
    replicated = {key: devices for key, devices in groups.items() if len(devices) > 1}
    differences = tuple(
        f"step {step}, {name}[{index}]: devices {', '.join(map(str, sorted(devices)))} differ"
        for (step, name, index), devices in sorted(replicated.items())
        if len(set(devices.values())) > 1
    )
    return Replicas(
        steps=len({step for step, _, _ in groups}),
        devices=len({device for devices in groups.values() for device in devices}),
        compared=len(replicated),
        fewest=min((len(devices) for devices in groups.values()), default=0),
        differences=differences,
    )


def same_bits(run_dir: Path, other: Path) -> tuple[int, int]:
    """Compares the pieces that two runs have in common.

    Returns:
      The number of pieces whose copies have one digest in both runs, and the number of pieces that
      were compared.
    """
    digests: list[dict[tuple[int, str, str], set[str]]] = []
    for folder in (run_dir, other):
        digests.append(defaultdict(set))
        for step, _, name, index, digest in _pieces(folder):
            digests[-1][step, name, index].add(digest)
    mine, theirs = digests
    common = mine.keys() & theirs.keys()
    return sum(len(mine[piece] | theirs[piece]) == 1 for piece in common), len(common)


def _pieces(run_dir: Path) -> Iterator[tuple[int, int, str, str, str]]:
    for path in sorted(run_dir.glob("digests-*.jsonl")):
        for row in read_rows(path):
            for name, (index, digest) in row["digests"].items():
                yield row["step"], row["device"], name, index, digest


def plot_losses(
    path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], unit: str = "byte"
) -> None:
    """Draws the loss of each run over the step, as a PNG.

    Args:
      path: File to write.
      runs: Rows of `metrics.jsonl` of each run, by its label.
      unit: Unit of a mean loss, byte or token.
    """
    from matplotlib.figure import Figure  # only here: everything else does without it

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (label, rows), style in zip(runs.items(), _styles(), strict=False):
        axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], label=label, **style)
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _styles() -> Iterator[dict[str, Any]]:
    """Line styles that leave a curve visible when the next one covers it."""
    yield {"linewidth": 4, "alpha": 0.35}
    while True:
        yield {"linewidth": 1.2}
