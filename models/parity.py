"""Does a model learn the same over islands as in one world? `python -m models.parity --help`.

Trains it on the same data from the same seed in several ways, each by `models.pretrain`:

- `one world`: in one ordinary JAX process with as many devices;
- `permuted`, `permuted 2` and so on: the same with devices and rows in other orders, which changes
  nothing but rounding. The largest difference of these runs is the noise floor;
- `other arithmetic`: one world with the flags of the unlike island below. Orders of rows leave each
  row's own arithmetic alone, so this run is part of the noise floor of unlike islands;
- `islands`: over two islands or more, through `jaxhet launch`;
- `unlike islands`: the same, and one island computes with other flags of XLA, so that its
  arithmetic is another one;
- `islands, --wire=mxint8`: over islands with the options of a `--thin`, which change losses. They
  are shown beside the noise floor, without a bar.

Writes a report: `report.md`, `report.json` and `curves.png`. The exit code is 1 if a run fails, a
loss or a norm of gradients is further from the one world's than allowed, or replicas were not
compared or differ.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models.extras.parity_report import Origin, plot, report
from models.extras.parity_runs import TOLERANCES, UNLIKE_FLAGS, Parity, Result, Rows, compare
from models.extras.records import METRICS, read_rows
from models.pretrain import parse_mesh

PROGRAM = "python -m models.parity"


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
        said = _last_words((folder / "log.txt").read_text())
        reason = f"exit code {ended.returncode}: {said}"
    return read_rows(folder / METRICS), reason


def _last_words(log: str) -> str:
    """The line of a failed run's log that says why: that of `jaxhet launch`, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    failed_first = [line for line in lines if "failed first: " in line]
    return [*failed_first, *lines[-1:], "it said nothing"][0]


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train over islands and in one world, compare, and write a report.",
        epilog="All other options are passed to models.pretrain in every run.",
        allow_abbrev=False,
    )

    def add(name: str, default: Any, text: str, **how: Any) -> None:
        told = "" if default is None else " (default: %(default)s)"
        parser.add_argument(name, default=default, help=text + told, **how)

    add(
        "--meshes",
        ["data=-1"],
        "meshes to train on: axes and sizes, the outer axis first",
        nargs="+",
    )
    add("--islands", 2, "number of islands, each of one process", type=int)
    add("--devices", 2, "devices of each island", type=int)
    add("--platform", "cpu", "platform of all processes", choices=UNLIKE_FLAGS)
    add(
        "--unlike",
        None,
        "XLA_FLAGS of the last of unlike islands; default: flags that change the platform's"
        " arithmetic; empty: no such run",
    )
    add(
        "--tolerance",
        None,
        "largest allowed relative difference of losses; default: by --dtype",
        type=float,
    )
    add("--dtype", "float32", "type to compute in", choices=TOLERANCES)
    add("--steps", 300, "steps of each run", type=int)
    add("--stages", None, "layers of each pipeline stage, on meshes with stages, for example 3,1")
    add("--learning-rate", 3e-4, "learning rate after the warm-up", type=float)
    add("--log-every", 50, "steps between comparisons of replicas", type=int)
    add(
        "--permutations",
        4,
        "runs of one world with devices and rows in other orders, whose largest difference is the"
        " noise floor; each takes the time of one run",
        type=int,
    )
    add(
        "--thin",
        [],
        "options of models.pretrain for one more run over islands, such as --thin=--wire=mxint8 or"
        ' --thin="--diloco --wire=mxint4"; give it again for more',
        action="append",
    )
    add("--jobs", 1, "runs at the same time; with more than 1, tokens/s are too low", type=int)
    add("--out", Path("runs/parity"), "folder of the report and the runs", type=Path)
    return parser


def parse(arguments: Sequence[str] | None = None) -> Parity:
    """Reads the command line; exits with a usage message if it is wrong."""
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if given.islands < 2 or given.devices < 1:
        parser.error(
            f"--islands {given.islands} and --devices {given.devices}: "
            "give at least 2 islands, and 1 device for each"
        )
    if given.tolerance is not None and not given.tolerance > 0:
        parser.error(f"--tolerance {given.tolerance}: give a number above 0")
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
        thin=given.thin,
        stages=given.stages,
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
