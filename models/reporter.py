"""What a run says while it goes: progress, metrics, digests, and the plot at its end."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import jaxhet
from models.records import METRICS, PLOT, Journal, digest_rows, plot_losses, read_rows
from models.train import Params, TrainState


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where and how often a run reports.

    `start` and `steps` are the first step and the one after the last. `counters` gives numbers that
    only grow; what a step adds to each is written with its metrics.
    """

    run_dir: Path
    start: int
    steps: int
    log_every: int
    tokens_per_step: int
    digest: bool
    counters: Callable[[], Mapping[str, Any]]


class Reporter:
    """Reports on one run: console, metrics and plot from process 0, digests from every process.

    The host waits for the devices only every `log_every` steps, so that it can prepare a step while
    the one before is under way; figures of time are means over such a window.
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
        self._window: list[dict[str, jax.Array]] = []
        self._done = settings.start
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
        """Takes note of one more step; returns whether it is time to `report`."""
        self._window.append(measures)
        self._bar.update()
        step = self._done + len(self._window)
        return step % self._settings.log_every == 0 or step == self._settings.steps

    def report(self, state: TrainState, on_difference: str) -> TrainState:
        """Waits for the steps since the last report, and writes their metrics.

        Compares all replicas of the state; `on_difference` is "warn", "sync" or "raise". Returns
        the state to go on with. Raises FloatingPointError when the loss is no longer finite, and
        `jaxhet.ReplicaError`.
        """
        rows = self._rows()
        replicas = jaxhet.check_replicas(state, on_difference="sync")
        rows[-1]["replicas"] = {
            "compared": replicas.num_compared,
            "different": len(replicas.differences),
            "largest_difference": max((d.largest for d in replicas.differences), default=0.0),
        }
        if self._metrics:
            self._metrics.append(rows)
        self._show(rows[-1])
        self._done += len(self._window)
        kept: TrainState = replicas.tree if on_difference == "sync" else state
        if replicas.differences:
            text = f"step {self._done}: {replicas}"
            if on_difference == "raise":
                raise jaxhet.ReplicaError(f"{text}; choose --update sharded")
            is_healed = on_difference == "sync"
            self.say(f"{text}; {'made equal' if is_healed else '--update sharded avoids it'}")
        self.digest(self._done, kept.params)
        self._begin_window()
        return kept

    def finish(self) -> None:
        """Draws the loss and says where everything is."""
        self._bar.close()
        if self._primary:
            folder = self._settings.run_dir
            plot_losses(folder / PLOT, {"loss": read_rows(folder / METRICS)})
            self.say(f"metrics, digests, checkpoints and the plot {PLOT} are in {folder}")

    def _journal(self, name: str) -> Journal:
        return Journal(self._settings.run_dir / name, self._settings.start)

    def _begin_window(self) -> None:
        self._window = []
        self._counted = self._settings.counters()
        self._began = time.perf_counter()

    def _rows(self) -> list[dict[str, Any]]:
        values = jaxhet.block_until_ready(self._window)
        count = len(values)
        seconds = (time.perf_counter() - self._began) / count
        shared = {
            "seconds": seconds,
            "tokens_per_second": self._settings.tokens_per_step / seconds,
        }
        for name, value in self._settings.counters().items():
            shared[name] = (value - self._counted.get(name, 0)) / count
        return [
            {"step": step, **{name: float(value) for name, value in measures.items()}, **shared}
            for step, measures in enumerate(values, start=self._done + 1)
        ]

    def _show(self, row: Mapping[str, Any]) -> None:
        loss, rate = f"{row['loss']:.4f}", f"{row['tokens_per_second']:.0f}"
        self._bar.set_postfix({"loss": loss, "tokens/s": rate})
        if self._bar.disable:
            total = self._settings.steps
            self.say(f"step {row['step']}/{total}  loss {loss}  {rate} tokens/s")
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(
                f"the loss is {loss} at step {row['step']}: lower --learning-rate, or compute in "
                "a type with more range (--dtype bfloat16 or float32)."
            )
