"""Does a model learn the same over two islands of GPUs as in one NCCL world?

    python -m benchmarks.gpu_parity [--shape 2x1x1] [--systems cuda_ipc,host,socket,nccl]
        [--steps 500] [--dtypes bfloat16,float32] [--deterministic] [--in-turn] [--json FILE]

Trains on all systems at the same time (--in-turn: one after the other, which is faster for large
models), and once more in one world with devices and rows in another order, which changes nothing
but rounding: the noise floor. (With a learning rate of 3e-3 that alone grows to percents, and then
a difference says nothing.) The training text is the source of Python's standard library, which is
longer than 500 steps of 8,192 tokens need. A run that reads its text more than once prints a
warning (--data, --order). Kernels are those that XLA has tuned. With --deterministic they also add
in one order, islands have the kernels of one world, and then every loss over islands must be the
same number as in one world.

Every process writes SHA-256 digests of its devices' parameters at the begin and at every logged
step; the replicas of all ranks are compared.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpu_jobs, tables
from benchmarks.training import Program
from models.configs import DTYPES
from models.data import ORDERS
from models.extras.corpus import LANGUAGE_REFERENCE, STANDARD_LIBRARY
from models.extras.records import Replicas, compare_replicas, differences, same_bits

WORKER = pathlib.Path(__file__).with_name("train_worker.py")
BASELINE, FLOOR = "nccl", "nccl, permuted"
# Without it the gradient of an embedding adds up rows in any order, another one in each run.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
DIFFERENCE_BAR = 1e-3
_TIMEOUT_S = 3600


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of training.

    Attributes:
      difference: largest difference of a loss to the one world's, relative.
      equal_steps: number of steps before the first loss that is another number.
      same_bits: number of pieces of parameters with the one world's bits, and of all, at all logged
        steps.
      is_complete: whether every rank left digests, and of every piece.
      losses: loss of each step, in nats per byte; for `--json`.
    """

    dtype: str
    system: str
    steps: int
    first_loss: float
    last_loss: float
    difference: float | None
    equal_steps: int | None
    same_bits: tuple[int, int] | None
    replicas: Replicas
    is_complete: bool
    losses: Sequence[float]
    needs_equal_bits: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether losses are too far apart, or replicas not all there and equal."""
        if not (self.is_complete and self.replicas.equal):
            return True
        if self.difference is None or self.system == FLOOR:
            return False
        return not self.difference < DIFFERENCE_BAR or self.has_unequal_bits

    @property
    def has_unequal_bits(self) -> bool:
        """Whether a loss or a parameter that must have the same bits has others."""
        if not self.needs_equal_bits or self.system == FLOOR:
            return False
        equal, compared = self.same_bits or (0, 0)
        return self.equal_steps != self.steps or not compared or equal != compared


def program_of(dtype: str, args: argparse.Namespace) -> Program:
    """The training step of a dtype."""
    return Program(
        config=args.config,
        mesh="data=-1",
        scan=True,
        batch=args.batch,
        seq=args.seq,
        dtype=dtype,
        layers=args.layers,
        learning_rate=args.learning_rate,
        data=args.data,
        order=args.order,
    )


def text_line(facts: Mapping[str, Any]) -> str:
    """Name, size and digest of the training text, and a warning if a run reads it again."""
    read = f"the run reads it {facts['passes']:.2f} times"
    if facts["passes"] > 1:
        read += (
            ". WARNING: a large model learns a repeated text by heart, and its losses say less: "
            "give a longer --data, or fewer --steps"
        )
    return f"Text: {facts['text']}, {facts['tokens']:,} tokens, SHA-256 {facts['sha256']}; {read}."


def train(dtype: str, systems: gpu_jobs.Systems, args: argparse.Namespace) -> list[Row]:
    """Trains on all systems, then once more in one world, permuted; a row for each."""
    program = program_of(dtype, args)

    def request(name: str, program: Program) -> tuple[Any, ...]:
        folder = _folder(args, dtype, name)
        shutil.rmtree(folder, ignore_errors=True)
        return "run", program, args.steps, args.log_every, folder

    answers: dict[str, list[Any]] = {}
    for names in [[name] for name in systems.alive] if args.in_turn else [[*systems.alive]]:
        answers |= systems.ask_all(lambda name: request(name, program), _TIMEOUT_S, names)
    if args.floor:
        permuted = request(FLOOR, dataclasses.replace(program, permute=1))
        if floor := systems.ask(BASELINE, permuted, _TIMEOUT_S):
            answers[FLOOR] = floor
    losses: dict[str, list[float]] = {system: answer[0] for system, answer in answers.items()}
    return [_row(dtype, system, losses, args) for system in losses]


def _folder(args: argparse.Namespace, dtype: str, system: str) -> pathlib.Path:
    return args.run_dir.absolute() / f"{dtype}-{system.replace(', ', '-')}"


def _row(
    dtype: str, system: str, losses: Mapping[str, Sequence[float]], args: argparse.Namespace
) -> Row:
    replicas = compare_replicas(_folder(args, dtype, system))
    mine = losses[system]
    is_compared = system != BASELINE and BASELINE in losses
    apart = differences(mine, losses[BASELINE]) if is_compared else None
    return Row(
        dtype=dtype,
        system=system,
        steps=len(mine),
        first_loss=mine[0],
        last_loss=mine[-1],
        # A NaN must not get lost in max().
        difference=None if apart is None else max(apart, key=lambda d: (d != d, d)),
        equal_steps=None
        if apart is None
        else next((i for i, d in enumerate(apart) if d != 0), len(apart)),
        same_bits=same_bits(_folder(args, dtype, system), _folder(args, dtype, BASELINE))
        if is_compared
        else None,
        replicas=replicas,
        is_complete=replicas.complete(args.num_devices, args.num_devices),
        losses=mine,
        needs_equal_bits=args.deterministic and is_compared,
    )


def table(rows: Sequence[Row]) -> str:
    """A line for each run."""
    headings = ("dtype", "system", "steps", "loss, first", "last", "largest difference")
    lines = []
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        if row.difference is not None and row.system != FLOOR:
            difference += (
                f" {'<' if row.difference < DIFFERENCE_BAR else 'MISSED'} {DIFFERENCE_BAR:g}"
            )
        equal = "equal" if row.is_complete and row.replicas.equal else "NOT equal: MISSED"
        lines.append(
            (
                row.dtype,
                row.system,
                str(row.steps),
                f"{row.first_loss:.5f}",
                f"{row.last_loss:.5f}",
                difference,
                ""
                if row.equal_steps is None
                else f"{row.equal_steps}{' MISSED' if row.has_unequal_bits else ''}",
                "" if row.same_bits is None else "{} of {}".format(*row.same_bits),
                f"{row.replicas.compared} comparisons at {row.replicas.steps} steps {equal}",
            )
        )
    return tables.markdown((*headings, "equal up to step", "equal parameters", "replicas"), lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpu_jobs.add_options(parser, ("cuda_ipc", "host", "socket", BASELINE), "2x1x1")
    parser.add_argument(
        "--deterministic", action="store_true", help=f"add {DETERMINISTIC}; bits must be equal"
    )
    parser.add_argument("--dtypes", type=gpu_jobs.names_of(DTYPES), default=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=50, help="steps between two digests")
    parser.add_argument(
        "--config", default="demo", help="a name in models.configs.CONFIGS, or plain"
    )
    parser.add_argument("--layers", type=int, default=0, help="0: those of the config")
    parser.add_argument("--batch", type=int, default=16, help="rows, over all devices")
    parser.add_argument("--seq", type=int, default=128, help="positions in a row, in bytes")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument(
        "--data",
        default=STANDARD_LIBRARY,
        help=f"text of the runs, read as bytes: Python's {STANDARD_LIBRARY} or"
        f" {LANGUAGE_REFERENCE}, or a path as for models.pretrain",
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="epochs",
        help="epochs: each row once before any row again; windows: random rows, which may overlap",
    )
    parser.add_argument("--in-turn", action="store_true", help="train on one system at a time")
    parser.add_argument("--floor", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--run-dir", type=pathlib.Path, default=pathlib.Path("runs/gpu_parity"))
    args = parser.parse_args()
    if BASELINE not in args.systems:
        parser.error(f"--systems without {BASELINE}: there is nothing to compare with")
    if args.data not in (STANDARD_LIBRARY, LANGUAGE_REFERENCE) and not os.path.exists(args.data):
        parser.error(f"--data {args.data}: no such file or folder")
    return args


def main() -> int:
    """Runs the benchmark; the exit code is 1 when a bar is missed."""
    args = parse()
    if args.deterministic:
        args.xla_flags = f"{args.xla_flags} {DETERMINISTIC}".strip()
    setting = gpu_jobs.setting(args)
    args.num_devices = setting.shape.num_devices
    rows: list[Row] = []
    facts: dict[str, Any] = {
        "shape": args.shape,
        "config": args.config,
        "xla_flags": setting.xla_flags,
    }
    with gpu_jobs.running(args.systems, setting, WORKER) as systems:
        facts |= systems.facts(("facts",))
        facts |= systems.facts(("text", program_of(args.dtypes[0], args), args.steps))
        print(text_line(facts), flush=True)
        for dtype in args.dtypes:
            rows += train(dtype, systems, args)
            tables.write_json(args.json, facts, rows)
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, config {args.config}")
    print(f"XLA flags: {facts['xla_flags'] or 'none'}; learning rate {args.learning_rate:g}")
    print(f"{table(rows)}\n{tables.made_at()}")
    for row in rows:
        for text in row.replicas.differences[:3]:
            print(f"{row.dtype}, {row.system}: {text}")
    return gpu_jobs.exit_code(sum(row.is_missed for row in rows), systems)


if __name__ == "__main__":
    sys.exit(main())
