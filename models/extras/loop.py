"""The steps of a run, and the work between them: evaluations, reports, checkpoints."""

import dataclasses
from typing import Any

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

import jaxhet
from models.data import Batches
from models.extras import initial, restored
from models.extras.ahead import wait_for_earlier
from models.extras.balance import Balance
from models.extras.checkpoint import Checkpoints
from models.extras.options import Options
from models.extras.reporter import Reporter
from models.sharding import activation_sharding
from models.train import Trainer, TrainState


class Stopped(Exception):  # noqa: N818
    """The end of a run before its last step, on request, with its state saved."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of `models.pretrain`. Its state and its place in the data are functions of the step.

    `evaluation` gives the batches of evaluations, the same each time; None: there are none.
    `balance` gives the unequal shares of batches; None: all devices have equal parts.
    """

    options: Options
    trainer: Trainer
    batches: Batches
    evaluation: Batches | None
    checkpoints: Checkpoints
    balance: Balance | None = None

    def first_step(self) -> int:
        """The first step.

        Raises:
          ValueError: The folder has checkpoints, and `--resume` is not given.
        """
        latest = self.checkpoints.latest_step() or 0
        if latest and self.options.resume == "never":
            raise ValueError(
                f"{self.options.run_dir} holds a run of {latest} steps: give --resume to"
                " continue it, or another --run-dir."
            )
        return latest

    def train(self, start: int, reporter: Reporter) -> None:
        """Runs the steps from `start` on.

        Raises:
          FloatingPointError: the loss is not finite; no such state is saved.
          OSError: a save has failed, a few steps ago at most.
          Stopped: the job was told to stop; the state is saved.
        """
        init, update = self.trainer.compile(jaxhet.jit)
        loss = self.trainer.compile_loss(jaxhet.jit)
        state = jaxhet.sync_replicas(self._restored(start) if start else self._initial(init))
        if self.trainer.update_axes:
            reporter.say(f"the update is split over {', '.join(self.trainer.update_axes)}")
        reporter.digest(start, state.params)
        if self.balance:
            self.balance.begin(reporter, state.params)
        sharding = activation_sharding("tokens", self.trainer.mesh)
        try:
            for step in range(start, self.options.steps):
                self.checkpoints.check()
                inputs = (
                    self.balance.inputs(step) if self.balance else (self.batches(step, sharding),)
                )
                state, measures = update(state, *inputs)
                is_logged = reporter.step(measures)
                if self.evaluation and self._is_due(step + 1, self.options.eval_every):
                    batches = self._evaluation_batches(self.evaluation, sharding)
                    params = state.params
                    reporter.evaluate(lambda b=batches, p=params: _losses(loss, p, b))
                is_stopped = reached_preemption_sync_point(step + 1)
                if is_logged or is_stopped:
                    state = reporter.report(state, self.options.on_difference)
                    if self.balance:
                        self.balance.review(reporter, state.params)
                if is_stopped or self._is_due(step + 1, self.options.checkpoint_every):
                    reporter.check()
                    self.checkpoints.save(step + 1, state)
                if is_stopped and step + 1 < self.options.steps:
                    self._stop(step + 1)
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; {self._kept()}.") from None
        self.checkpoints.wait()
        reporter.finish()

    def _initial(self, init: Any) -> TrainState:
        """The state before the first step, from the program that makes it."""
        if self.options.init_from is None:
            return init(self.options.seed)
        params = initial.parameters(self.options.init_from, self.trainer)
        return jaxhet.jit(self.trainer.begin, out_shardings=self.trainer.state_shardings())(params)

    def _stop(self, step: int) -> None:
        self.checkpoints.wait()
        raise Stopped(
            f"told to stop (SIGTERM); the checkpoint of step {step} is complete: continue"
            " with --resume."
        )

    def _is_due(self, done: int, every: int) -> bool:
        """Whether an event of every `every` steps, and of the end, is due now."""
        return done == self.options.steps or (every > 0 and done % every == 0)

    def _restored(self, step: int) -> TrainState:
        return restored.restore(self.checkpoints, step, self.trainer)

    def _evaluation_batches(
        self, batches: Batches, sharding: jax.sharding.Sharding
    ) -> list[jax.Array]:
        return [batches(i, sharding) for i in range(self.options.eval_batches)]

    def _kept(self) -> str:
        try:
            self.checkpoints.wait()
        except OSError as error:
            return str(error).removesuffix(".")
        latest = self.checkpoints.latest_step()
        if latest is None:
            return "no checkpoint was made before"
        return f"the checkpoint of step {latest} is kept"


def _losses(loss: Any, params: Any, batches: list[jax.Array]) -> list[jax.Array]:
    """The losses of parameters on batches."""
    losses: list[jax.Array] = []
    for batch in batches:
        losses.append(loss(params, batch))
        wait_for_earlier(losses)
    return losses
