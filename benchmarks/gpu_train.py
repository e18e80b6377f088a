"""Does a LLaMA train over two islands of GPUs as fast as plain JAX in one NCCL world?

    python -m benchmarks.gpu_train [--shape 2x1x1] [--programs plain,1b,8b] [--json FILE]
        [--systems cuda_ipc,host,socket,nccl,nccl_overlap] [--meshes data=-1 fsdp=-1]
        [--forms scan,unrolled] [--rows 8]

Plain JAX runs with XLA's defaults (`nccl`) and with its latency-hiding scheduler (`nccl_overlap`);
two islands run with jaxhet's own defaults. A ratio is that to the better one of plain JAX. `plain`
is benchmarks/plain_llama.py, a program that knows nothing of jaxhet; the others are of models/.
`--same-kernels` gives all systems the same kernels, to compare bits: never speed.

All systems live side by side and take turns. Compilations of one program run on all systems at the
same time. benchmarks/README.md says what the columns are.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpu_jobs, tables
from benchmarks.training import LAYERS, PLAIN, ROWS, Built, Program
from models.configs import CONFIGS
from models.extras.flops import peak_flops

WORKER = pathlib.Path(__file__).with_name("train_worker.py")
BASELINES = ("nccl", "nccl_overlap")
FORMS = ("scan", "unrolled")
# tokens/s over the better baseline's, by system; those that stage, with many rows only.
BARS = {"cuda_ipc": 1.0, "host": 0.98, "socket": 0.95}
ANY_ROWS = ("cuda_ipc",)
# Shares of the devices' peak, by config, with many rows.
MFU_BARS = {"1b": 0.45, "8b": 0.50}
MANY_ROWS = 8
COMPILE_BAR = 1.2


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on a system. A field is None where it is not measured.

    Attributes:
      step_s: median of the turns' means.
      ratio: tokens/s over the baseline's.
      alone_s: a step with as much work for each device, without the other island.
      exchange_s: the step's exchanges without the step, one after the other.
      peak_bytes: the most memory in use on a device.
      loss: after the last step, the same for all systems.
      mfu: share of the devices' peak that the model's own operations are.
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
    peak_bytes: int
    loss: float
    mfu: float | None
    mfu_bar: float | None

    @property
    def exposed_s(self) -> float | None:
        """Difference of the step's time to the time without the other island."""
        return self.step_s - self.alone_s if self.alone_s else None

    @property
    def hidden(self) -> float | None:
        """The share of the exchanges' time by which the step is not longer than without them."""
        if not self.alone_s or not self.exchange_s:
            return None
        return 1 - (self.step_s - self.alone_s) / self.exchange_s

    @property
    def is_missed(self) -> bool:
        """Whether the row is below a bar."""
        return (
            _is_below(self.ratio, self.bar)
            or _is_below(self.mfu, self.mfu_bar)
            or (self.compile_ratio is not None and self.compile_ratio > COMPILE_BAR)
        )


def _is_below(value: float | None, bar: float | None) -> bool:
    return value is not None and bar is not None and value < bar


def measure(
    program: Program, systems: gpu_jobs.Systems, args: argparse.Namespace, facts: Mapping[str, Any]
) -> list[Row]:
    """Builds and times `program` on all systems."""
    built = systems.ask_all(lambda _: ("build", program))
    seconds: dict[str, list[float]] = {}
    last: dict[str, tuple[float, int]] = {}
    for _ in range(args.repeats):
        for system in [*systems.alive]:
            if answers := systems.ask(system, ("time", args.steps)):
                seconds.setdefault(system, []).append(max(time for time, _, _ in answers))
                last[system] = answers[0][1], max(peak for _, _, peak in answers)
    medians = {system: statistics.median(times) for system, times in seconds.items()}
    slowest = {system: _slowest(answers) for system, answers in built.items()}
    plain = [system for system in BASELINES if system in medians]
    best_s = min((medians[system] for system in plain), default=None)
    plain_compile_s = max((slowest[system].compile_s for system in plain), default=None)
    has_many_rows = program.batch >= MANY_ROWS * args.num_devices
    peak = peak_flops(facts["device"], program.dtype)
    rows = []
    for system, step_s in medians.items():
        is_barred = not args.same_kernels and (has_many_rows or system in ANY_ROWS)
        alone_s, exchange_s = _apart(program, system, systems, args)
        is_compared = system not in BASELINES
        rows.append(
            Row(
                system=system,
                program=program,
                step_s=step_s,
                tokens_per_s=program.tokens / step_s,
                ratio=best_s / step_s if best_s and is_compared else None,
                bar=BARS.get(system) if is_barred else None,
                alone_s=alone_s,
                exchange_s=exchange_s,
                compile_ratio=slowest[system].compile_s / plain_compile_s
                if plain_compile_s and is_compared
                else None,
                built=slowest[system],
                peak_bytes=last[system][1],
                loss=last[system][0],
                mfu=slowest[system].flops / step_s / (peak * args.num_devices) if peak else None,
                mfu_bar=MFU_BARS.get(program.config)
                if has_many_rows and not args.same_kernels
                else None,
            )
        )
    return rows


def _slowest(answers: Sequence[Built]) -> Built:
    """The longest compile time of a process, with the passes of the process that compiled.

    A process that loads another one's executable runs no passes.
    """
    slowest = max(answers, key=lambda built: built.compile_s)
    compiler = max(answers, key=lambda built: built.between_s)
    passes = ("pre_s", "post_s", "between_s", "after_s")
    return dataclasses.replace(slowest, **{name: getattr(compiler, name) for name in passes})


def _apart(
    program: Program, system: str, systems: gpu_jobs.Systems, args: argparse.Namespace
) -> tuple[float | None, float | None]:
    """Seconds of the step without exchanges, and of the exchanges without the step."""
    if not (args.hidden and gpu_jobs.is_bridged(system)):
        return None, None
    islands = gpu_jobs.Shape(*map(int, args.shape.split("x"))).islands
    ask = functools.partial(systems.ask, system, timeout_s=gpu_jobs.COMPILE_TIMEOUT_S)
    exchanges, alone = (
        ask(("exchanges_alone", args.repeats)),
        ask(("alone", program, islands, args.steps)),
    )
    return max(alone) if alone else None, max(exchanges) if exchanges else None


def table(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """A line for each program on a system."""
    headings = ("program", "system", "tokens/s", "step ms", "ratio", "MFU", "exposed ms", "hidden")
    moved = ("apart", "MB across", "GB peak")
    compiled = ("trace s", "compile s", "PRE", "POST", "after POST", "ratio", "loss")
    lines = []
    for row in rows:
        built, program = row.built, row.program
        form = "scan" if program.scan else "unrolled"
        layers = f"/{program.layers}" if program.layers else ""
        passes = (f"{s:.2f}" for s in (built.pre_s, built.post_s, built.after_s))
        rows_each = program.batch // facts["devices"]
        lines.append(
            (
                f"{program.config}{layers} {program.mesh} {form}, {rows_each} rows",
                row.system,
                f"{row.tokens_per_s:,.0f}",
                f"{row.step_s * 1e3:.1f}",
                "" if row.ratio is None else tables.with_bar(row.ratio, row.bar),
                "" if row.mfu is None else tables.with_bar(row.mfu, row.mfu_bar),
                "" if row.exposed_s is None else f"{row.exposed_s * 1e3:.1f}",
                "" if row.hidden is None else f"{row.hidden:.0%}",
                f"{built.apart:.0%}" if built.exchanges else "",
                f"{built.exchange_bytes / 1e6:.1f} in {built.exchanges}" if built.exchanges else "",
                f"{row.peak_bytes / 1e9:.1f}",
                f"{built.trace_s:.1f}",
                f"{built.compile_s:.1f}",
                *(passes if built.exchanges else ("", "", "")),
                "" if row.compile_ratio is None else _compile_with_bar(row.compile_ratio),
                f"{row.loss:.4f}",
            )
        )
    return tables.markdown((*headings, *moved, *compiled), lines)


def _compile_with_bar(ratio: float) -> str:
    return f"{ratio:.2f}{' MISSED' if ratio > COMPILE_BAR else ''}"


def programs(args: argparse.Namespace, num_devices: int) -> list[Program]:
    """The programs that the options choose."""
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
        for config in args.programs
        for mesh in args.meshes
        for form in args.forms
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpu_jobs.add_options(parser, ("cuda_ipc", "host", "socket", *BASELINES), "2x1x1")
    parser.add_argument(
        "--programs",
        type=gpu_jobs.names_of((*PLAIN, *CONFIGS)),
        default=["plain", "1b", "8b"],
        help="benchmarks/plain_llama.py, or names in models.configs.CONFIGS",
    )
    parser.add_argument(
        "--same-kernels", action="store_true", help=f"add {gpu_jobs.SAME_KERNELS}, to compare bits"
    )
    parser.add_argument("--meshes", nargs="+", default=["data=-1", "fsdp=-1"], help="axes")
    parser.add_argument("--forms", type=gpu_jobs.names_of(FORMS), default=list(FORMS))
    parser.add_argument("--dtype", default="bfloat16", help="type to compute in")
    parser.add_argument("--layers", type=int, help="0: those of the config")
    parser.add_argument("--rows", type=int, help="rows of a batch, for each device")
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
    if args.same_kernels:
        args.xla_flags = f"{args.xla_flags} {gpu_jobs.SAME_KERNELS}".strip()
    setting = gpu_jobs.setting(args)
    args.num_devices = setting.shape.num_devices
    rows: list[Row] = []
    facts: dict[str, Any] = {"shape": args.shape, "xla_flags": setting.xla_flags}
    with gpu_jobs.running(args.systems, setting, WORKER) as systems:
        facts |= systems.facts(("facts",))
        for program in programs(args, setting.shape.num_devices):
            done = measure(program, systems, args, facts)
            rows += done
            print(table(done, facts), flush=True)  # the results so far, if the time runs out
            tables.write_json(args.json, facts, rows)
    flags = facts["xla_flags"] or "no flags given"
    print(f"\n{facts['devices']} x {facts['device']}, jax {facts['jax']}, {flags}")
    print(f"{table(rows, facts)}\n{tables.made_at()}")
    return gpu_jobs.exit_code(sum(row.is_missed for row in rows), systems)


if __name__ == "__main__":
    sys.exit(main())
