"""Does a LLaMA train over two islands of GPUs as fast as in one NCCL world?

    python -m benchmarks.gpu_train [--shape 2x1x1] [--systems cuda_ipc,shm,nccl] [--configs 1b,8b]
        [--meshes data=-1 fsdp=-1] [--forms scan,unrolled] [--json FILE]

All systems live side by side, with the same XLA flags, and take turns. Compilations of one program
run on all systems at the same time. benchmarks/README.md says what the columns are.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import gpu_jobs, tables
from benchmarks.training import LAYERS, ROWS, Built, Program

WORKER = pathlib.Path(__file__).with_name("train_worker.py")
BASELINE = "nccl"
XLA_FLAGS = f"--xla_gpu_enable_latency_hiding_scheduler=true {gpu_jobs.SAME_KERNELS}"
FORMS = ("scan", "unrolled")
# tokens/s over the baseline's, by system and first axis of the mesh, and time of compilation.
BARS = {
    ("cuda_ipc", "data"): 1.0,
    ("cuda_ipc", "fsdp"): 0.98,
    ("shm", "data"): 0.95,
    ("shm", "fsdp"): 0.95,
}
COMPILE_BAR = 1.2


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on a system. What is None is not measured there.

    Attributes:
      step_s: median of the turns' means.
      ratio: tokens/s over the baseline's.
      alone_s: a step with as much work for each device, without the other island.
      exchange_s: the step's exchanges without the step, one after the other.
      loss: after the last step, the same for all systems.
    """

    system: str
    program: Program
    step_s: float
    tokens_per_s: float
    ratio: float | None
    bar: float | None
    alone_s: float | None
    exchange_s: float | None
    compile_ratio: float | None
    built: Built
    loss: float

    @property
    def hidden(self) -> float | None:
        """The share of the exchanges' time by which the step is not longer than without them."""
        if not self.alone_s or not self.exchange_s:
            return None
        return 1 - (self.step_s - self.alone_s) / self.exchange_s

    @property
    def is_missed(self) -> bool:
        """Whether the row is below a bar."""
        slow = self.bar is not None and self.ratio is not None and self.ratio < self.bar
        return slow or (self.compile_ratio is not None and self.compile_ratio > COMPILE_BAR)


def measure(program: Program, systems: gpu_jobs.Systems, args: argparse.Namespace) -> list[Row]:
    """Builds and times `program` on all systems."""
    built = systems.ask_all(lambda _: ("build", program))
    seconds: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for _ in range(args.repeats):
        for system in [*systems.alive]:
            if answers := systems.ask(system, ("time", args.steps)):
                seconds.setdefault(system, []).append(max(time for time, _ in answers))
                losses[system] = answers[0][1]
    medians = {system: statistics.median(times) for system, times in seconds.items()}
    slowest = {s: max(answers, key=lambda b: b.compile_s) for s, answers in built.items()}
    rows = []
    for system, step_s in medians.items():
        alone_s, exchange_s = _apart(program, system, systems, args)
        is_compared = BASELINE in medians and system != BASELINE
        plain = slowest[BASELINE].compile_s if is_compared else None
        rows.append(
            Row(
                system=system,
                program=program,
                step_s=step_s,
                tokens_per_s=program.tokens / step_s,
                ratio=medians[BASELINE] / step_s if is_compared else None,
                bar=BARS.get((system, next(iter(program.axes)))),
                alone_s=alone_s,
                exchange_s=exchange_s,
                compile_ratio=slowest[system].compile_s / plain if plain else None,
                built=slowest[system],
                loss=losses[system],
            )
        )
    return rows


def _apart(
    program: Program, system: str, systems: gpu_jobs.Systems, args: argparse.Namespace
) -> tuple[float | None, float | None]:
    """Seconds of the step without exchanges, and of the exchanges without the step."""
    if not (args.hidden and gpu_jobs.is_bridged(system)):
        return None, None
    ask = functools.partial(systems.ask, system, timeout_s=gpu_jobs.COMPILE_TIMEOUT_S)
    exchanges, alone = ask(("exchanges_alone", args.repeats)), ask(("alone", program, args.steps))
    return max(alone) if alone else None, max(exchanges) if exchanges else None


def table(rows: Sequence[Row]) -> str:
    """A line for each program on a system."""
    headings = ("program", "system", "tokens/s", "step ms", "ratio", "hidden", "apart", "MB across")
    compiled = ("compile s", "PRE", "POST", "after POST", "ratio", "loss")
    lines = []
    for row in rows:
        built, program = row.built, row.program
        form = "scan" if program.scan else "unrolled"
        layers = f"/{program.layers}" if program.layers else ""
        passes = (f"{s:.2f}" for s in (built.pre_s, built.post_s, built.after_s))
        lines.append(
            (
                f"{program.config}{layers} {program.mesh} {form}",
                row.system,
                f"{row.tokens_per_s:,.0f}",
                f"{row.step_s * 1e3:.1f}",
                "" if row.ratio is None else tables.judged(row.ratio, row.bar),
                "" if row.hidden is None else f"{row.hidden:.0%}",
                f"{built.apart:.0%}" if built.exchanges else "",
                f"{built.exchange_bytes / 1e6:.1f} in {built.exchanges}" if built.exchanges else "",
                f"{built.compile_s:.1f}",
                *(passes if built.exchanges else ("", "", "")),
                "" if row.compile_ratio is None else _judged_compile(row.compile_ratio),
                f"{row.loss:.4f}",
            )
        )
    return tables.markdown((*headings, *compiled), lines)


def _judged_compile(ratio: float) -> str:
    return f"{ratio:.2f}{' MISSED' if ratio > COMPILE_BAR else ''}"


def programs(args: argparse.Namespace, num_devices: int) -> list[Program]:
    """Those that the options choose."""
    return [
        Program(
            config=config,
            mesh=mesh,
            scan=form == "scan",
            batch=(args.rows or ROWS.get(config, 1)) * num_devices,
            seq=args.seq,
            dtype=args.dtype,
            layers=LAYERS.get(config, 0) if args.layers is None else args.layers,
        )
        for config in args.configs.split(",")
        for mesh in args.meshes
        for form in args.forms
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpu_jobs.add_options(parser, ("cuda_ipc", "shm", BASELINE), "2x1x1", XLA_FLAGS)
    parser.add_argument("--configs", default="1b,8b", help="names in models.configs.CONFIGS")
    parser.add_argument("--meshes", nargs="+", default=["data=-1", "fsdp=-1"], help="axes")
    parser.add_argument("--forms", type=gpu_jobs.names_of(FORMS), default=list(FORMS))
    parser.add_argument("--dtype", default="bfloat16", help="type to compute in")
    parser.add_argument("--layers", type=int, help="0: those of the config")
    parser.add_argument("--rows", type=int, help="of a batch, for each device")
    parser.add_argument("--seq", type=int, default=2048, help="positions in a row")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--repeats", type=int, default=4, help="turns")
    parser.add_argument(
        "--hidden",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time steps without exchanges and exchanges without steps",
    )
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; the exit code is 1 when a bar is missed."""
    args = parse()
    setting = gpu_jobs.setting(args)
    rows: list[Row] = []
    facts: dict[str, Any] = {"shape": args.shape, "xla_flags": setting.xla_flags}
    with gpu_jobs.running(args.systems, setting, WORKER) as systems:
        facts |= systems.facts(("facts",))
        for program in programs(args, setting.shape.num_devices):
            done = measure(program, systems, args)
            rows += done
            print(table(done), flush=True)  # what is known if the time runs out
            tables.write_json(args.json, facts, rows)
    print(f"\n{facts['devices']} x {facts['device']}, jax {facts['jax']}, {facts['xla_flags']}")
    print(table(rows))
    return gpu_jobs.verdict(sum(row.is_missed for row in rows), systems)


if __name__ == "__main__":
    sys.exit(main())
