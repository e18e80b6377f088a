"""Reports of a run: progress, metrics, digests, and the plot at its end."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from tqdm import tqdm

import jaxhet
from models.extras.ahead import wait_for_earlier
from models.extras.records import METRICS, PLOT, Journal, digest_rows, plot_losses, read_rows
from models.train import Params, TrainState

Result = TypeVar("Result")

_ADVICE = "--update sharded avoids it; with --diloco, --on-difference sync repairs it"
# Largest exponent of e in a float.
_LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Folder and frequency of a run's reports, and the figures that they need.

    Attributes:
      start: the first step; `steps` is the one after the last.
      counters: gives numbers that only grow; what a step adds to each is written with its metrics.
      flops: the model's floating-point operations in a step, over all devices.
      peak_flops: peak FLOP/s of all devices together; None if unknown.
      unit: unit of a mean loss in the plot: byte or token.
      gathered: gives measures of steps as numbers that all processes have.
    """

    run_dir: Path
    start: int
    steps: int
    log_every: int
    tokens_per_step: int
    digest: bool
    counters: Callable[[], Mapping[str, Any]]
    flops: float
    peak_flops: float | None
    unit: str = "byte"
    gathered: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list


class Reporter:
    """Reports on one run: console, metrics and plot from process 0, digests from every process.

    The host waits for the devices every `log_every` steps, and otherwise only for the step 16 steps
    earlier, so that it can prepare a step while others run; figures of time are means over such a
    window of `log_every` steps. `seconds_per_step` is that of the last one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        process = jax.process_index()
        self._primary = process == 0
        self._metrics = self._journal(METRICS) if self._primary else None
        self._digests = self._journal(f"digests-{process}.jsonl") if settings.digest else None
        self._bar = tqdm(
            total=settings.steps,
            initial=settings.start,
            unit="step",
            disable=not (self._primary and sys.stderr.isatty()),
        )
        self._window: list[dict[str, Any]] = []
        self._done = settings.start
        self._notes: dict[str, Any] = {}
        self.seconds_per_step = 0.0
        self._begin_window()

    def say(self, text: str) -> None:
        """Prints a line for people, once for the whole job."""
        if self._primary:
            tqdm.write(text, file=sys.stderr)

    def digest(self, step: int, params: Params) -> None:
        """Writes the digests of this process's pieces of the parameters, if they are wanted."""
        if self._digests:
            self._digests.append(digest_rows(step, params))

    def step(self, measures: dict[str, jax.Array]) -> bool:
        """Records one more step; returns whether it is time to `report`.

        First waits for an earlier step (`models.extras.ahead`).
        """
        self._window.append(measures)
        wait_for_earlier(self._window)
        self._bar.update()
        step = self._done + len(self._window)
        return step % self._settings.log_every == 0 or step == self._settings.steps

    def evaluate(self, evaluate: Callable[[], Sequence[jax.Array]]) -> None:
        """Adds `eval_loss`, the mean of losses, and `perplexity` to the metrics of the last step.

        Waits for the steps before it; its time is not part of theirs.
        """
        jaxhet.block_until_ready(self._window)
        losses = self.aside(lambda: jaxhet.block_until_ready(evaluate()))
        loss = math.fsum(map(float, losses)) / len(losses)
        # math.exp refuses what no float holds.
        perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
        self._window[-1] = self._window[-1] | {"eval_loss": loss, "perplexity": perplexity}

    def aside(self, work: Callable[[], Result]) -> Result:
        """Runs work whose time is not part of the steps; returns its result."""
        began = time.perf_counter()
        result = work()
        self._paused += time.perf_counter() - began
        return result

    def note(self, name: str, value: Any) -> None:
        """Adds a value to the metrics of the next step."""
        self._notes[name] = value

    def check(self) -> None:
        """Waits for the steps since the last report.

        Raises:
          FloatingPointError: A loss or a norm of gradients is not finite: the parameters after such
            a step are of no use. The measurements are written first.
        """
        self._window = self._settings.gathered(jaxhet.block_until_ready(self._window))
        for step, measures in enumerate(self._window, self._done + 1):
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(value := float(measures[name])):
                    self._write(self._rows())
                    raise FloatingPointError(
                        f"the {name.replace('_', ' ')} is {value} at step {step}: lower "
                        "--learning-rate, or compute in a type with more range (--dtype bfloat16 "
                        "or float32)"
                    )

    def report(self, state: TrainState, on_difference: str) -> TrainState:
        """Waits for the steps since the last report, writes their metrics, compares all replicas.

        Args:
          state: The state after the steps.
          on_difference: Reaction to replicas that differ: "warn", "sync" or "raise".

        Returns:
          The state to go on with.

        Raises:
          FloatingPointError: `check` raises it.
          jaxhet.ReplicaError: Replicas differ, and `on_difference` is "raise".
        """
        self.check()
        rows = self._rows()
        replicas = jaxhet.check_replicas(state, on_difference="sync")
        rows[-1]["replicas"] = {
            "compared": replicas.num_compared,
            "different": len(replicas.differences),
            "largest_difference": max((d.largest for d in replicas.differences), default=0.0),
        }
        self._write(rows)
        self._show(rows[-1])
        self._done += len(self._window)
        kept: TrainState = replicas.tree if on_difference == "sync" else state
        if replicas.differences:
            text = f"step {self._done}: {replicas}"
            if on_difference == "raise":
                raise jaxhet.ReplicaError(f"{text}; {_ADVICE}")
            is_healed = on_difference == "sync"
            self.say(f"{text}; {'made equal' if is_healed else _ADVICE}")
        self.digest(self._done, kept.params)
        self._begin_window()
        return kept

    def finish(self) -> None:
        """Draws the loss and says where everything is; each process with GPUs says its memory."""
        self._bar.close()
        stats = jax.local_devices()[0].memory_stats() or {}
        if limit := stats.get("bytes_limit"):
            peak = stats["peak_bytes_in_use"]
            part = f"{peak / limit:.2f} of {limit / 1e9:.1f} GB"
            tqdm.write(f"peak memory {peak / 1e9:.1f} GB, {part}", file=sys.stderr)
        if self._primary:
            folder = self._settings.run_dir
            plot_losses(folder / PLOT, {"loss": read_rows(folder / METRICS)}, self._settings.unit)
            self.say(f"metrics, digests, checkpoints and the plot {PLOT} are in {folder}")

    def _journal(self, name: str) -> Journal:
        return Journal(self._settings.run_dir / name, self._settings.start)

    def _begin_window(self) -> None:
        self._window = []
        self._counted = self._settings.counters()
        self._paused = 0.0
        self._began = time.perf_counter()

    def _rows(self) -> list[dict[str, Any]]:
        values = jaxhet.block_until_ready(self._window)
        count = len(values)
        seconds = (time.perf_counter() - self._began - self._paused) / count
        self.seconds_per_step = seconds
        shared = {
            "seconds": seconds,
            "tokens_per_second": self._settings.tokens_per_step / seconds,
            "model_flops_per_second": self._settings.flops / seconds,
        }
        if self._settings.peak_flops:
            shared["mfu"] = shared["model_flops_per_second"] / self._settings.peak_flops
        for name, value in self._settings.counters().items():
            shared[name] = (value - self._counted.get(name, 0)) / count
        rows: list[dict[str, Any]] = [
            {"step": step, **{name: float(value) for name, value in measures.items()}, **shared}
            for step, measures in enumerate(values, start=self._done + 1)
        ]
        rows[0] |= self._notes
        self._notes = {}
        return rows

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._metrics:
            self._metrics.append(rows)

    def _show(self, row: Mapping[str, Any]) -> None:
        told = {"loss": f"{row['loss']:.4f}", "tokens/s": f"{row['tokens_per_second']:.0f}"}
        if "mfu" in row:
            told["mfu"] = f"{row['mfu']:.3f}"
        if "perplexity" in row:
            told["perplexity"] = f"{row['perplexity']:.2f}"
        self._bar.set_postfix(told)
        if self._bar.disable:
            more = "".join(f"  {n} {told[n]}" for n in ("mfu", "perplexity") if n in told)
            self.say(
                f"step {row['step']}/{self._settings.steps}  loss {told['loss']}  "
                f"{told['tokens/s']} tokens/s{more}"
            )
