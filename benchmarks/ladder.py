"""What does each mechanism bring? One model on a ladder of ways to join the same devices.

    python -m benchmarks.ladder [--platform cpu|cuda] [--shape 2x1x2] [--config tiny] [--steps 500]
        [--parallel data,fsdp,stage] [--rungs all_socket,socket,…] [--json FILE] [--out DIR]

From every collective over staged TCP, also between the devices of an island, up to one world of the
vendor's own library. All rungs have the same devices, the same initial parameters and the same
batches of real text. In several turns the jobs of all rungs live side by side; with `--turns 1` one
rung runs after the other, each with all memory. benchmarks/README.md says what the columns are.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpu_jobs, gpus, ladder_report
from benchmarks.ladder_report import Row
from benchmarks.ladder_rungs import DEFAULT, PARALLEL, REFERENCE, RUNGS, why_absent, why_impossible
from benchmarks.tables import made_at
from benchmarks.training import LAYERS, ROWS, Program, Trace
from jaxhet.testing import FAST_COMPILE, Shape
from models.configs import CONFIGS, DTYPES

# First steps of each turn that are not timed, since caches still hold another job's data.
UNTIMED = 2
_STEP_TIMEOUT_S = 60
# Options by platform, where they are not given.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "config": "tiny",
        "steps": 24,
        "turns": 3,
        "seq": 64,
        "dtype": "float32",
        "xla_flags": FAST_COMPILE["XLA_FLAGS"],  # compilers take most of the time there
    },
    "cuda": {
        "config": "1b",
        "steps": 500,
        "turns": 1,
        "seq": 2048,
        "dtype": "bfloat16",
        "xla_flags": "",
    },
}


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Settings of the runs.

    Attributes:
      setting: platform, shape of the islands, and flags of XLA.
      programs: by their name in `PARALLEL`.
      rungs: names in `RUNGS`.
      steps: number of steps of each program on each rung, untimed ones included.
      turns: number of parts that the steps are divided into; 1: one rung after the other.
    """

    setting: gpu_jobs.Setting
    programs: Mapping[str, Program]
    rungs: Sequence[str]
    steps: int
    turns: int

    @property
    def turn_steps(self) -> list[int]:
        """Steps of each turn."""
        return [
            self.steps * (n + 1) // self.turns - self.steps * n // self.turns
            for n in range(self.turns)
        ]

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """The rungs whose jobs live at the same time."""
        return [[*names]] if self.turns > 1 else [[name] for name in names]


def climb(ladder: Ladder) -> tuple[list[Row], dict[str, Any]]:
    """A row for each program on each rung, in this order, and what they ran on."""
    absent = {name: why_absent(RUNGS[name], ladder.setting) for name in ladder.rungs}
    facts: dict[str, Any] = {}
    found: list[Row] = []
    for group in ladder.groups([name for name in ladder.rungs if not absent[name]]):
        starts = {
            name: functools.partial(RUNGS[name].start, ladder.setting, len(group)) for name in group
        }
        with gpu_jobs.started(starts) as systems:
            if systems.alive:
                facts |= systems.facts(("facts",))
            for parallel in ladder.programs:
                found += _train(ladder, parallel, group, systems)
    rows = {(row.parallel, row.rung): row for row in found}
    for parallel in ladder.programs:
        for name, reason in absent.items():
            rows.setdefault((parallel, name), Row(parallel, name, RUNGS[name].text, reason))
    ordered = [rows[parallel, name] for parallel in ladder.programs for name in ladder.rungs]
    return ladder_report.compared(ordered, REFERENCE), facts


def _train(
    ladder: Ladder, parallel: str, group: Sequence[str], systems: gpu_jobs.Systems
) -> list[Row]:
    """A row for each rung of `group`, whose jobs are `systems`: they take turns."""
    program, shape = ladder.programs[parallel], ladder.setting.shape
    reasons = {name: why_impossible(RUNGS[name], program, shape) for name in group}
    names = [name for name in group if not reasons[name]]

    def begin(name: str) -> tuple[Any, ...]:
        return "begin", RUNGS[name].program(program, shape.islands), RUNGS[name].is_alone

    systems.ask_all(begin, names=names)
    turns: dict[str, list[list[Trace]]] = {name: [] for name in names}
    first = 0
    for steps in ladder.turn_steps:
        for name in names:
            if traces := systems.ask(name, ("trace", first, steps), _STEP_TIMEOUT_S * steps):
                turns[name].append(traces)
        first += steps
    rows = []
    for name in group:
        row = Row(parallel, name, RUNGS[name].text, reasons[name])
        if name in systems.failures:
            row = dataclasses.replace(
                row, reason=last_words(systems.failures[name]), is_failed=True
            )
        elif name in turns:
            row = _measured(row, ladder, turns[name])
        rows.append(row)
    return rows


def _measured(row: Row, ladder: Ladder, turns: Sequence[Sequence[Trace]]) -> Row:
    """Row of a rung, with the figures of its turns."""
    rung, islands = RUNGS[row.rung], ladder.setting.shape.islands
    program = rung.program(ladder.programs[row.parallel], islands)
    # Not alone, the islands train one batch together, and a step is as long as on the slowest.
    if not rung.is_alone:
        turns = [[dataclasses.replace(trace, island=0) for trace in turn] for turn in turns]
    total, each = ladder_report.rates_of(turns, program.tokens, UNTIMED)
    traces = [trace for turn in turns for trace in turn]
    transports = {name for trace in traces for name in trace.bytes_sent}
    return dataclasses.replace(
        row,
        remark=rung.remark(ladder.setting),
        is_comparable=not rung.is_alone,
        tokens_per_s=total,
        losses=[loss for turn in turns for loss in turn[0].losses],
        islands=[ladder_report.reached(rates, 50) for rates in each] if rung.is_alone else (),
        exchanges=sum(trace.exchanges for trace in traces) / ladder.steps,
        bytes_sent={
            name: sum(trace.bytes_sent.get(name, 0) for trace in traces) / ladder.steps
            for name in sorted(transports)
        },
    )


def last_words(text: str) -> str:
    """Last line of a failed job's output that names an error, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1]


def write(folder: pathlib.Path, title: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Writes `ladder.md`, `ladder.json`, `tokens.png` and `losses.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ladder.md").write_text(f"{title}\n\n{ladder_report.table(rows)}\n")
    write_json(folder / "ladder.json", rows, facts)
    ladder_report.plot(folder / "tokens.png", rows, "tokens_per_s", "tokens/s of a step")
    ladder_report.plot(folder / "losses.png", rows, "losses", "loss (nats per byte)")


def write_json(path: pathlib.Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Writes `facts`, and the rows with their percentiles as the member `rows`."""
    written = {**facts, "rows": [row.figures for row in rows]}
    path.write_text(json.dumps(written, indent=1) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder", description=(__doc__ or "").split("\n")[0]
    )
    names = gpu_jobs.names_of
    add = parser.add_argument
    add("--platform", choices=DEFAULTS, help="default: cuda where this machine has GPUs, else cpu")
    add("--shape", default="2x1x2", help="islands x processes of each x devices of each process")
    add(
        "--parallel",
        type=names(PARALLEL),
        default=[*PARALLEL],
        help=f"programs, of {','.join(PARALLEL)}",
    )
    add("--rungs", type=names(RUNGS), default=[*DEFAULT], help=f"rungs, of {','.join(RUNGS)}")
    add("--config", choices=CONFIGS, help="size of the model")
    add("--dtype", choices=DTYPES, help="type to compute in")
    add("--layers", type=int, help="0: those of the config")
    add("--rows", type=int, help="rows of a batch, for each device")
    add("--seq", type=int, help="positions in a row")
    add("--steps", type=int, help="steps of each program on each rung, warm-up included")
    add("--turns", type=int, help="parts of the steps; 1: one rung after the other")
    add("--xla-flags", help="flags of XLA for all rungs; default: none, on CPU fewer optimizations")
    add("--json", type=pathlib.Path, help="file for all figures")
    add("--out", type=pathlib.Path, help="folder for the table, all figures and the plots")
    args = parser.parse_args(arguments)
    args.platform = args.platform or ("cuda" if gpus.visible()[0] else "cpu")
    for name, value in DEFAULTS[args.platform].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if Shape(*map(int, args.shape.split("x"))).islands < 2:
        parser.error(f"--shape {args.shape} has one island, and a ladder needs two: choose 2x1x2")
    if args.turns < 1 or args.steps <= args.turns * UNTIMED:
        parser.error(
            f"--steps {args.steps} in --turns {args.turns} leaves nothing to time: the first "
            f"{UNTIMED} steps of a turn are warm-up"
        )
    return args


def programs(args: argparse.Namespace, num_devices: int) -> dict[str, Program]:
    """The programs that the options choose, by name."""
    return {
        name: Program(
            config=args.config,
            mesh=PARALLEL[name],
            scan=True,
            batch=(args.rows or ROWS.get(args.config, 1)) * num_devices,
            seq=args.seq,
            dtype=args.dtype,
            layers=LAYERS.get(args.config, 0) if args.layers is None else args.layers,
        )
        for name in args.parallel
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 1 if a rung failed."""
    args = parse(arguments)
    setting = dataclasses.replace(gpu_jobs.setting(args), xla_flags=args.xla_flags)
    chosen = programs(args, setting.shape.num_devices)
    rows, facts = climb(Ladder(setting, chosen, args.rungs, args.steps, args.turns))
    program = next(iter(chosen.values()))
    facts |= {"platform": args.platform, "shape": args.shape, "xla_flags": setting.xla_flags}
    facts |= {"turns": args.turns, "untimed": UNTIMED, "program": dataclasses.asdict(program)}
    del facts["program"]["mesh"]
    title = (
        f"{args.shape} {args.platform} devices (islands x processes x devices), jax "
        f"{facts.get('jax', 'not started')}; {args.config}, {args.dtype}, {program.batch} rows of "
        f"{args.seq}; {args.steps} steps in {args.turns} turn(s), of which the first {UNTIMED} of "
        f"each are not timed; XLA flags: {args.xla_flags or 'none'}. {made_at()}"
    )
    print(f"{title}\n\n{ladder_report.table(rows)}")
    if args.json:
        write_json(args.json, rows, facts)
    if args.out:
        write(args.out, title, rows, facts)
    return int(any(row.is_failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
