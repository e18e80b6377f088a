"""Trainings that are compared with one world: their commands, and how far apart they may be."""

import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.extras.records import Replicas, compare_replicas, differences

ONE_WORLD, PERMUTED, OTHER = "one world", "permuted", "other arithmetic"
ISLANDS, UNLIKE = "islands", "unlike islands"
# Flags that change an island's arithmetic: no fused multiply-add; untuned kernels.
UNLIKE_FLAGS = {
    "cpu": "--xla_cpu_max_isa=AVX",
    "cuda": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    "rocm": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
# Largest relative difference of a loss from the one world's, by the type of the computation. With
# unlike islands it may also be so many noise floors.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3, "float64": 1e-12}
NOISE_FLOORS = 2.0
# Largest difference of the norm of gradients, in these tolerances or in its own noise floors, with
# islands of either kind. A loss is a mean over tokens, and rounding moves it less.
GRADIENT_TOLERANCES = 10.0

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """The runs to make, and how far their losses may be apart.

    Attributes:
      meshes: values of `--mesh` of `models.pretrain`; each is trained in all ways.
      islands: number of islands.
      devices: number of devices of each island.
      platform: platform of all processes; a key of `UNLIKE_FLAGS`.
      unlike: flags of XLA of the last island in the run `unlike islands`, and of the world in the
        run `other arithmetic`; empty: no such runs.
      tolerance: the largest difference of a loss, relative to the one world's.
      out: folder of the report and the runs.
      permutations: number of runs with devices and rows in other orders, for the noise floor.
      jobs: number of runs at the same time.
      thin: options of `models.pretrain` for more runs over islands, each a text such as
        `--wire=mxint8`. Their losses have no bar.
      stages: value of `--stages` of `models.pretrain`, on meshes with stages; None: no such option.
      training: options of `models.pretrain` for all runs.
    """

    meshes: Sequence[str]
    islands: int
    devices: int
    platform: str
    unlike: str
    tolerance: float
    out: Path
    permutations: int
    jobs: int
    thin: Sequence[str]
    stages: str | None
    training: Sequence[str]

    def words(self) -> list[str]:
        """The options of `models.parity` that give these results again."""
        return [
            *("--meshes", *self.meshes),
            f"--islands={self.islands}",
            f"--devices={self.devices}",
            f"--platform={self.platform}",
            f"--unlike={self.unlike}",
            f"--tolerance={self.tolerance:g}",
            f"--permutations={self.permutations}",
            *(f"--thin={options}" for options in self.thin),
            *self._stages,
            *self.training,
        ]

    def runs(self, mesh: str) -> dict[str, list[str]]:
        """The command of each run on a mesh, by its name."""
        commands = {ONE_WORLD: self._training(mesh, ONE_WORLD)}
        for seed in range(1, self.permutations + 1):
            name = PERMUTED if seed == 1 else f"{PERMUTED} {seed}"
            commands[name] = [*self._training(mesh, name), f"--permute={seed}"]
        if self.unlike:
            commands[OTHER] = self._training(mesh, OTHER)
        commands[ISLANDS] = [*self._launch(), *self._training(mesh, ISLANDS), "--digest"]
        if self.unlike:
            other = f"--island-env=island{self.islands - 1}:XLA_FLAGS={self._unlike_flags}"
            commands[UNLIKE] = [*self._launch(other), *self._training(mesh, UNLIKE), "--digest"]
        for options in self.thin:
            name = f"{ISLANDS}, {options}"
            training = [*self._training(mesh, name), *options.split(), "--digest"]
            commands[name] = [*self._launch(), *training]
        return commands

    def folder(self, mesh: str, run: str) -> Path:
        """The folder of a run."""
        return self.out / mesh.replace("=", "").replace(",", "_") / run.replace(" ", "_")

    def environment(self, run: str) -> dict[str, str]:
        """The environment of a run: the platform, and no settings of another job."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
        kept["JAX_PLATFORMS"] = self.platform
        if self.platform == "cpu":
            kept["JAX_NUM_CPU_DEVICES"] = str(self.islands * self.devices)
        return {**kept, "XLA_FLAGS": self._unlike_flags} if run == OTHER else kept

    @property
    def _unlike_flags(self) -> str:
        """All flags of XLA of the unlike island."""
        return f"{os.environ.get('XLA_FLAGS', '')} {self.unlike}".strip()

    def _training(self, mesh: str, run: str) -> list[str]:
        where = [f"--mesh={mesh}", f"--run-dir={self.folder(mesh, run)}"]
        stages = self._stages if "stage=" in mesh else ()
        return [sys.executable, "-m", "models.pretrain", *self.training, *stages, *where]

    @property
    def _stages(self) -> Sequence[str]:
        return (f"--stages={self.stages}",) if self.stages else ()

    def _launch(self, *options: str) -> list[str]:
        launch = [sys.executable, "-m", "jaxhet.cli", "launch", f"--islands={self.islands}"]
        return [*launch, "--processes-per-island=1", f"--devices={self.devices}", *options, "--"]


@dataclasses.dataclass(frozen=True)
class Result:
    """A run, compared with the one world of its mesh. Values that are not known are None.

    Attributes:
      reason: why the run failed; empty if it reached its end.
      loss: the last loss, in nats per token.
      largest: |a - b| / |b| of the losses a and the one world's b, the largest of all steps.
      final: the same of the last step.
      gradient: like `largest`, for norms of gradients.
      gradient_final: like `final`, for norms of gradients.
      allowed: largest allowed value of `largest`.
      gradient_allowed: largest allowed value of `gradient`.
      replicas: pieces of parameters that were compared over devices; None in one world.
      num_checked: number of comparisons of an array that the run made itself.
      num_different: number of these comparisons that found a difference.
      tokens_per_s: tokens per second, the median of the steps.
    """

    mesh: str
    run: str
    reason: str = ""
    steps: int = 0
    loss: float | None = None
    largest: float | None = None
    final: float | None = None
    gradient: float | None = None
    gradient_final: float | None = None
    allowed: float | None = None
    gradient_allowed: float | None = None
    replicas: Replicas | None = None
    num_checked: int = 0
    num_different: int = 0
    tokens_per_s: float | None = None

    @property
    def failures(self) -> list[str]:
        """The reasons why this run does not pass; empty if it does."""
        if self.reason:
            return [self.reason]
        texts = []
        for values, apart, allowed in (
            ("losses", self.largest, self.allowed),
            ("norms of gradients", self.gradient, self.gradient_allowed),
        ):
            if allowed is not None and not (apart or 0.0) <= allowed:
                texts.append(f"{values} differ by {apart:.1e}; allowed is {allowed:.1e}")
        if self.replicas is not None:
            if not self.num_checked and not self.replicas.compared:
                texts.append("no replicas were compared")
            if self.num_different:
                texts.append(f"{self.num_different} replicas differed during the run")
            texts += [f"parameters differ: {text}" for text in self.replicas.differences[:3]]
        return texts


def is_floor(run: str) -> bool:
    """Whether a run of that name is part of a noise floor."""
    return run.startswith(PERMUTED) or run == OTHER


def compare(
    parity: Parity, mesh: str, rows: Mapping[str, Rows], reasons: Mapping[str, str]
) -> list[Result]:
    """The results of a mesh.

    Args:
      parity: The comparison.
      mesh: The mesh, as in `--mesh`.
      rows: Metrics of each run of the mesh.
      reasons: Reasons of the runs that failed.
    """
    one = rows.get(ONE_WORLD, [])

    def floor(name: str, run: str) -> float:
        """Largest difference of a run of islands that rounding explains."""
        others = [r for r in parity.runs(mesh) if is_floor(r) and (r != OTHER or run == UNLIKE)]
        found = (_largest(rows.get(other, []), one, name) or 0.0 for other in others)
        return NOISE_FLOORS * max(found, default=0.0)

    results = []
    for run in parity.runs(mesh):
        mine = rows.get(run, [])
        reason = reasons.get(run, "")
        if not reason and (not mine or len(mine) != len(one)):
            reason = f"{len(mine)} steps are in its metrics, and {len(one)} in the one world's"
        if reason:
            results.append(Result(mesh, run, reason))
            continue
        is_bridged, is_barred = ISLANDS in run, run in (ISLANDS, UNLIKE)
        allowed = max(parity.tolerance, floor("loss", run) if run == UNLIKE else 0.0)
        gradient_allowed = max(GRADIENT_TOLERANCES * parity.tolerance, floor("gradient_norm", run))
        checked = [row["replicas"] for row in mine if "replicas" in row]
        results.append(
            Result(
                mesh,
                run,
                steps=len(mine),
                loss=mine[-1]["loss"],
                largest=None if run == ONE_WORLD else _largest(mine, one, "loss"),
                final=None if run == ONE_WORLD else _differences(mine, one, "loss")[-1],
                gradient=None if run == ONE_WORLD else _largest(mine, one, "gradient_norm"),
                gradient_final=None
                if run == ONE_WORLD
                else _differences(mine, one, "gradient_norm")[-1],
                allowed=allowed if is_barred else None,
                gradient_allowed=gradient_allowed if is_barred else None,
                replicas=compare_replicas(parity.folder(mesh, run)) if is_bridged else None,
                num_checked=sum(c["compared"] for c in checked),
                num_different=sum(c["different"] for c in checked),
                tokens_per_s=statistics.median(row["tokens_per_second"] for row in mine),
            )
        )
    return results


def _differences(rows: Rows, reference: Rows, name: str) -> list[float]:
    return differences([row[name] for row in rows], [row[name] for row in reference])


def _largest(rows: Rows, reference: Rows, name: str) -> float | None:
    if not rows or len(rows) != len(reference):
        return None
    # A NaN must not get lost in max().
    return max(_differences(rows, reference, name), key=lambda d: (math.isnan(d), d))
