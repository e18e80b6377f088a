"""Checkpoints of a run: state and the facts that a resumed run must share, saved atomically.

In a job of several processes all share the folder, and each writes the shards that it owns. Orbax
synchronizes them with `jax.experimental.multihost_utils` (a program over all devices) unless
`active_processes` is set, and with the coordination service's barriers if it is. It is set here: a
save or a restore runs no device program and crosses no island.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from models.train import TrainState

Facts = dict[str, Any]

# Characters of what a library says about a failed write.
_LONGEST_CAUSE = 500


class Checkpoints:
    """The checkpoints under a folder, newest `keep` kept. A context manager; use from one thread.

    `facts` is what must be equal for a resumed run to continue this one: JSON values by name.
    A save is complete or absent: Orbax writes to a temporary folder and renames it, and an older
    checkpoint is deleted only afterwards.
    """

    def __init__(self, folder: Path, facts: Facts, keep: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._facts = facts
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=False,
                enable_async_checkpointing=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=0,
                    active_processes=set(range(jax.process_count())),
                    barrier_sync_key_prefix="models",
                ),
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Finished steps of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Saves the state after `step` steps and waits until it is safe on disk.

        Raises OSError if it can't be written; the checkpoints before it are as they were.
        """
        latest = self.latest_step()
        if latest == step:
            return
        contents = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            facts=ocp.args.JsonSave(self._facts),  # pyright: ignore[reportCallIssue]
        )
        try:
            self._manager.save(step, args=contents)
        except Exception as error:  # Orbax and TensorStore raise ValueError, OSError and others
            for unfinished in self._folder.glob(f"{step}{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            kept = "there is no earlier one" if latest is None else f"that of step {latest} is kept"
            cause = str(error).strip().splitlines()[0][:_LONGEST_CAUSE]
            raise OSError(
                f"the checkpoint of step {step} can't be written to {self._folder}; {kept}: "
                f"{type(error).__name__}: {cause}. Make room there, then start again with --resume."
            ) from error

    def restore(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """The state saved after `step` steps, laid out as `shardings` says.

        Raises ValueError if the run that saved it had other facts.
        """
        self._check_facts(step)
        target = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        contents = ocp.args.Composite(
            state=ocp.args.StandardRestore(target),  # pyright: ignore[reportCallIssue]
        )
        return self._manager.restore(step, args=contents)["state"]

    def _check_facts(self, step: int) -> None:
        contents = ocp.args.Composite(facts=ocp.args.JsonRestore())
        saved = self._manager.restore(step, args=contents)["facts"]
        names = sorted(saved.keys() | self._facts.keys())
        other = [
            f"{name} was {saved.get(name)!r} and is {self._facts.get(name)!r}"
            for name in names
            if saved.get(name) != self._facts.get(name)
        ]
        if other:
            raise ValueError(
                f"can't resume from step {step} in {self._manager.directory}: {'; '.join(other)}. "
                "Give the values of the first run, or another --run-dir."
            )
