"""Does a model learn the same over islands as in one world? `python -m models.parity --help`.

Trains it on the same data from the same seed in several ways, each by `models.pretrain`:

- `one world`: in one ordinary JAX process with as many devices;
- `permuted`, `permuted 2` and so on: the same with devices and rows in other orders, which changes
  nothing but rounding. The largest difference of these runs is the noise floor;
- `other arithmetic`: one world with the flags of the unlike island below. Orders of rows leave each
  row's own arithmetic alone, so this run is part of the noise floor of unlike islands;
- `islands`: over two islands or more, through `jaxhet launch`;
- `unlike islands`: the same, and one island computes with other flags of XLA, so that its
  arithmetic is another one.

Writes a report: `report.md`, `report.json` and `curves.png`. The exit code is 1 if a run fails, a
loss or a norm of gradients is further from the one world's than allowed, or replicas were not
compared or differ.
"""

import argparse
import dataclasses
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from models import initial, options
from models.corpus import open_corpus
from models.pretrain import parse_mesh
from models.records import METRICS, Replicas, compare_replicas, differences, read_rows

PROGRAM = "python -m models.parity"
ONE_WORLD, PERMUTED, OTHER = "one world", "permuted", "other arithmetic"
ISLANDS, UNLIKE = "islands", "unlike islands"
# Flags that make an island's arithmetic another one: no fused multiply-add; untuned kernels.
UNLIKE_FLAGS = {
    "cpu": "--xla_cpu_max_isa=AVX",
    "cuda": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    "rocm": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
# How far a loss may be from the one world's, relative to it, by the type that is computed in. With
# unlike islands it may also be so many noise floors away.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3, "float64": 1e-12}
NOISE_FLOORS = 2.0
# How many of these tolerances the norm of gradients may be away, with islands of either kind; or so
# many noise floors of its own. A loss is a mean over tokens, and rounding moves it less.
GRADIENT_TOLERANCES = 10.0

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Parity:
    """The runs to make, and how far their losses may be apart.

    Attributes:
      meshes: values of `--mesh` of `models.pretrain`; each is trained in all ways.
      islands: how many; `devices` of each.
      platform: platform of all processes; a key of `UNLIKE_FLAGS`.
      unlike: flags of XLA of the last island in the run `unlike islands`, and of the world in the
        run `other arithmetic`; empty: no such runs.
      tolerance: the largest difference of a loss, relative to the one world's.
      out: folder of the report and the runs.
      permutations: how many runs with devices and rows in other orders make the noise floor.
      jobs: how many runs are made at the same time.
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
    training: Sequence[str]

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
        return [sys.executable, "-m", "models.pretrain", *self.training, *where]

    def _launch(self, *options: str) -> list[str]:
        launch = [sys.executable, "-m", "jaxhet.cli", "launch", f"--islands={self.islands}"]
        return [*launch, "--processes-per-island=1", f"--devices={self.devices}", *options, "--"]


@dataclasses.dataclass(frozen=True)
class Result:
    """A run beside the one world of its mesh; what could not be had is None.

    Attributes:
      reason: why the run failed; empty if it reached its end.
      loss: the last one, in nats per token.
      largest: |a - b| / |b| of the losses a to the one world's b, the largest of all steps; `final`
        is that of the last step. `gradient` and `gradient_final`: of the norms of gradients.
      allowed: largest allowed value of `largest`; `gradient_allowed` of `gradient`.
      replicas: pieces of parameters that were compared over devices, None in one world;
        `num_checked` and `num_different` are those that the run itself compared on its devices.
      tokens_per_s: median of the steps.
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
        """How far a run of islands may be away by rounding."""
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
        is_bridged = run in (ISLANDS, UNLIKE)
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
                allowed=allowed if is_bridged else None,
                gradient_allowed=gradient_allowed if is_bridged else None,
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


def train(parity: Parity, mesh: str, run: str, command: Sequence[str]) -> tuple[Rows, str]:
    """Makes a run.

    Args:
      parity: The comparison.
      mesh: The mesh, as in `--mesh`.
      run: Name of the run.
      command: Command that makes the run.

    Returns:
      The metrics, and the reason why the run failed; empty if it did not.
    """
    print(f"{mesh}, {run}", file=sys.stderr, flush=True)
    folder = parity.folder(mesh, run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(
            command, env=parity.environment(run), stdout=log, stderr=log, check=False
        )
    reason = ""
    if ended.returncode:
        said = (folder / "log.txt").read_text().strip().splitlines()
        reason = f"exit code {ended.returncode}: {said[-1] if said else 'it said nothing'}"
    return read_rows(folder / METRICS), reason


@dataclasses.dataclass(frozen=True)
class Origin:
    """Commit, text and machine of a report.

    Attributes:
      commit: commit of this program; it says if files have changed since.
      text: name of the training text; `tokens` and `digest`: how many it has, and their SHA-256. A
        text of bytes has the digest of its file.
      cpus: how many CPUs the machine has, and `load` is how many processes wanted one on average in
        the minute before the first run.
    """

    commit: str
    text: str
    tokens: int
    digest: str
    cpus: int
    load: float

    @classmethod
    def of(cls, parity: Parity) -> Self:
        """The origin of a report that is about to be made. Reads the whole text."""
        given = options.parse(parity.training)
        corpus = open_corpus(given.data, initial.tokenizer(given))
        load, _, _ = os.getloadavg()
        cpus = os.cpu_count() or 1
        return cls(commit(), corpus.name, corpus.size, corpus.digest(), cpus, round(load, 1))


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the checkout that `folder` and its `parity.py` are part of."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=9", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git checkout)"


_HEADINGS = (
    *("mesh", "run", "last loss", "loss: largest difference", "last", "gradient norm: largest"),
    *("last", "replicas", "tokens/s", "result"),
)


def report(parity: Parity, results: Sequence[Result], origin: Origin) -> str:
    """The results as Markdown.

    Args:
      parity: The comparison.
      results: The results, a line for each.
      origin: Commit and training text.
    """
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *(_line(result) for result in results)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    words = ["python", "-m", "models.parity", "--meshes", *parity.meshes, *parity.training]
    command = shlex.join(words)
    unlike = f"; the last one of unlike islands with `{parity.unlike}`" if parity.unlike else ""
    where = f"{parity.islands} islands of {parity.devices} {parity.platform} devices{unlike}"
    gradient = GRADIENT_TOLERANCES * parity.tolerance
    return f"""# Loss parity

`{command}`: {where}.

{table}

Made at commit {origin.commit}. Training text: {origin.text}, {origin.tokens:,} tokens, SHA-256
`{origin.digest}`.

Differences are relative to the one world's: the largest of all steps, and the one of the last step.
The noise floor is the largest difference of the permuted worlds ({parity.permutations} for a mesh),
which differ by rounding alone. That of unlike islands includes one world of the other arithmetic.
The loss of islands may differ by {parity.tolerance:.0e}. The loss of unlike islands
may also differ by {NOISE_FLOORS:g} noise floors. Norms of gradients may be {gradient:.0e} away, or
{NOISE_FLOORS:g} noise floors of their own. Replicas: how many
pieces of parameters were compared over devices, by SHA-256, and how many comparisons of an array
the run made itself.

{_speed(parity, origin)}

![Loss, and its difference to the one world's, over the step](curves.png)
"""


def _speed(parity: Parity, origin: Origin) -> str:
    """A sentence about tokens/s: not comparable if the machine had anything else to do."""
    shared = f"{origin.load:g} processes wanted the {origin.cpus} CPUs before the first run"
    if parity.jobs > 1:
        shared += f", and {parity.jobs} runs were made at a time"
    if parity.jobs > 1 or origin.load > 1:
        return f"Tokens/s (median of the steps) are **not comparable**: {shared}."
    return f"Tokens/s: median of the steps; {shared}."


def _line(result: Result) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    replicas = ""
    if result.replicas is not None:
        equal = (
            "equal" if not (result.replicas.differences or result.num_different) else "NOT equal"
        )
        replicas = f"{result.replicas.compared:,} + {result.num_checked:,} {equal}"
    if result.failures:
        outcome = f"FAILED: {'; '.join(result.failures)}"
    elif result.allowed is None:
        outcome = "noise floor" if is_floor(result.run) else "reference"
    else:
        outcome = f"passes (at most {result.allowed:.0e})"
    return (
        f"`{result.mesh}`",
        result.run,
        text(result.loss, ".5f"),
        text(result.largest, ".1e"),
        text(result.final, ".1e"),
        text(result.gradient, ".1e"),
        text(result.gradient_final, ".1e"),
        replicas,
        text(result.tokens_per_s, ",.0f"),
        outcome,
    )


def plot(path: Path, rows: Mapping[str, Mapping[str, Rows]]) -> None:
    """Draws losses and their differences for each mesh, as a PNG."""
    from matplotlib.figure import Figure  # only here: everything else does without it

    figure = Figure(figsize=(10, 0.6 + 3.0 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (mesh, runs), (losses, apart) in zip(rows.items(), panels, strict=True):
        one = runs.get(ONE_WORLD, [])
        for run, mine in runs.items():
            steps = [row["step"] for row in mine]
            wide = {"linewidth": 4, "alpha": 0.35} if run == ONE_WORLD else {"linewidth": 1.0}
            losses.plot(steps, [row["loss"] for row in mine], label=run, **wide)
            if run != ONE_WORLD and len(mine) == len(one):
                # Zero has no place on a logarithmic axis.
                values = [d or math.nan for d in _differences(mine, one, "loss")]
                apart.plot(steps, values, label=run, linewidth=1.0)
        losses.set(title=mesh, xlabel="step", ylabel="loss (nats per token)")
        apart.set(title=mesh, xlabel="step", ylabel="relative difference", yscale="log")
        for axes in (losses, apart):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def run(parity: Parity) -> list[Result]:
    """Trains on all meshes; writes the report after each, and returns all results."""
    origin = Origin.of(parity)
    results: list[Result] = []
    rows: dict[str, dict[str, Rows]] = {}
    parity.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(parity.jobs) as pool:
        started = {
            mesh: {
                run: pool.submit(train, parity, mesh, run, command)
                for run, command in parity.runs(mesh).items()
            }
            for mesh in parity.meshes
        }
        for mesh, runs in started.items():
            ended = {run: trained.result() for run, trained in runs.items()}
            rows[mesh] = {run: metrics for run, (metrics, _) in ended.items()}
            reasons = {run: reason for run, (_, reason) in ended.items() if reason}
            results += compare(parity, mesh, rows[mesh], reasons)
            _write(parity, origin, results, rows)
    return results


def _write(
    parity: Parity,
    origin: Origin,
    results: Sequence[Result],
    rows: Mapping[str, Mapping[str, Rows]],
) -> None:
    (parity.out / "report.md").write_text(report(parity, results, origin))
    written = {
        "origin": dataclasses.asdict(origin),
        "results": [{**dataclasses.asdict(r), "failures": r.failures} for r in results],
    }
    (parity.out / "report.json").write_text(json.dumps(written, indent=1) + "\n")
    plot(parity.out / "curves.png", rows)


def parse(arguments: Sequence[str] | None = None) -> Parity:
    """Reads the command line; exits with a usage message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train over islands and in one world, compare, and write a report.",
        epilog="All other options are passed to models.pretrain in every run.",
        allow_abbrev=False,
    )

    def add(name: str, default: Any, text: str, **how: Any) -> None:
        told = "" if default is None else " (%(default)s)"
        parser.add_argument(name, default=default, help=text + told, **how)

    add("--meshes", ["data=-1"], "axes, outer one first", nargs="+")
    add("--islands", 2, "islands, of one process each", type=int)
    add("--devices", 2, "devices of each island", type=int)
    add("--platform", "cpu", "of all processes", choices=UNLIKE_FLAGS)
    add(
        "--unlike",
        None,
        "XLA_FLAGS of the last of unlike islands (some that change the platform's"
        " arithmetic); empty: no such run",
    )
    add("--tolerance", None, "largest relative difference of losses (by --dtype)", type=float)
    add("--dtype", "float32", "to compute in", choices=TOLERANCES)
    add("--steps", 300, "of each run", type=int)
    add("--learning-rate", 3e-4, "after the warm-up", type=float)
    add("--log-every", 50, "steps between comparisons of replicas", type=int)
    add(
        "--permutations",
        4,
        "runs of one world with devices and rows in other orders, whose largest difference is the"
        " noise floor; each takes the time of one run",
        type=int,
    )
    add("--jobs", 1, "runs at the same time; tokens/s are then too low", type=int)
    add("--out", Path("runs/parity"), "folder of the report and the runs", type=Path)
    given, rest = parser.parse_known_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: at least 1 run at a time")
    if given.permutations < 1:
        parser.error(f"--permutations {given.permutations}: the noise floor needs at least 1")
    for name in ("mesh", "run-dir", "permute", "digest", "resume"):
        if any(word == f"--{name}" or word.startswith(f"--{name}=") for word in rest):
            parser.error(f"--{name} is set for each run: leave it out")
    for mesh in given.meshes:
        try:
            parse_mesh(mesh)
        except ValueError as error:
            parser.error(str(error))
    shared = {
        name: getattr(given, name) for name in ("dtype", "steps", "learning_rate", "log_every")
    }
    return Parity(
        meshes=given.meshes,
        islands=given.islands,
        devices=given.devices,
        platform=given.platform,
        unlike=UNLIKE_FLAGS[given.platform] if given.unlike is None else given.unlike,
        tolerance=TOLERANCES[given.dtype] if given.tolerance is None else given.tolerance,
        out=given.out,
        permutations=given.permutations,
        jobs=given.jobs,
        training=[*(f"--{n.replace('_', '-')}={v}" for n, v in shared.items()), *rest],
    )


def main() -> int:
    """Runs the command; the exit code is 1 if a result is bad."""
    parity = parse()
    results = run(parity)
    print((parity.out / "report.md").read_text())
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
