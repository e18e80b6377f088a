"""Checkpoints of a run: state and the facts that a resumed run must share, saved atomically.

A save copies the state to the host and returns; threads write it while training goes on. In a job
of several processes all share the folder, and each writes the shards that it owns. Orbax
synchronizes them with `jax.experimental.multihost_utils` (a program over all devices) unless
`active_processes` is set, and with the coordination service's barriers if it is. It is set here: a
save or a restore runs no device program and crosses no island.

Orbax's `CheckpointManager` is not used: after a failed save its threads wait at a barrier for the
other processes, which wait for this one, and nobody would be told for minutes.
"""

import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

import jaxhet
from models.extras.pipeline import parse_stages
from models.train import TrainState

Facts = dict[str, Any]

# The only fact that may differ in a resumed run: the layers of each stage, which decide the shapes
# of the saved parameters.
LAYOUT = "stages"
# Length of a library's message about a failed write, in characters.
_LONGEST_CAUSE = 500


class Checkpoints:
    """The checkpoints under a folder, newest `keep` kept. A context manager; use from one thread.

    `facts` is what must be equal for a resumed run to continue this one, but for `LAYOUT`: JSON
    values by name.
    A save is complete or absent, whenever the process ends: Orbax writes to a temporary folder and
    renames it, and an older checkpoint is deleted only afterwards. Temporary folders that an
    earlier run has left are deleted first.
    """

    def __init__(self, folder: Path, facts: Facts, keep: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()
        self._facts = facts
        self._keep = keep
        self._checkpointer = _checkpointer()
        self._finisher = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None
        if jax.process_index() == 0:
            self._delete_temporary("*")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for a save that is under way, unless a peer that takes part in it has failed."""
        if isinstance(error, jaxhet.JaxhetError):
            return
        try:
            self.wait()
        except OSError:
            if error is None:
                raise
        self._finisher.shutdown()
        self._checkpointer.close()

    def latest_step(self) -> int | None:
        """Finished steps of the newest complete checkpoint; None if there is none."""
        return max(self._steps(), default=None)

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save the state after `step` steps; the arrays may be donated afterwards.

        Waits for the save before.

        Raises:
          OSError: This save or the one before can't be written.
        """
        self.wait()
        if self.latest_step() == step:
            return
        contents = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
            facts=ocp.args.JsonSave(self._facts),  # pyright: ignore[reportCallIssue]
        )
        with ExitStack() as protection:
            protection.enter_context(jaxhet.saving(self._folder))
            try:
                self._checkpointer.save(self._folder / str(step), args=contents)
            except Exception as error:  # Orbax and TensorStore raise ValueError, OSError and others
                raise self._failure(step, error) from error
            self._saving = step, self._finisher.submit(self._finish, protection.pop_all())

    def check(self) -> None:
        """Raises OSError if the last save has failed; does not wait for it."""
        if self._saving and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is safe on disk.

        Raises:
          OSError: The save can't be written. Earlier checkpoints are as they were.
        """
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        try:
            saving.result()
        except Exception as error:  # see `save`
            raise self._failure(step, error) from error

    def restore(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """Reads a checkpoint.

        Args:
          step: Number of steps before the checkpoint was saved.
          shapes: Shapes and types of the state's arrays.
          shardings: Shardings of the arrays in the result.

        Raises:
          ValueError: The run that saved the checkpoint had other facts.
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
        return self._checkpointer.restore(self._folder / str(step), args=contents)["state"]

    def layout(self, step: int) -> tuple[tuple[int, ...], int]:
        """A checkpoint's `--stages`, and the number of rows of its blocks' parameters."""
        stages = parse_stages(self._saved_facts(step).get(LAYOUT))
        blocks = read_shapes(self._folder / str(step))["blocks"]
        return stages, jax.tree.leaves(blocks)[0].shape[0]

    def _steps(self) -> list[int]:
        """Finished steps of all complete checkpoints."""
        return ocp.utils.checkpoint_steps(self._folder)

    def _finish(self, protection: ExitStack) -> None:
        """Waits for the threads that write, then deletes old checkpoints."""
        with protection:
            self._checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            for step in sorted(self._steps())[: -self._keep]:
                # Renamed first: a half-deleted checkpoint must not look like a complete one.
                folder = self._folder / str(step)
                folder.rename(f"{folder}{ocp.utils.TMP_DIR_SUFFIX}.old")
                self._delete_temporary(str(step))

    def _delete_temporary(self, step: str) -> None:
        for unfinished in self._folder.glob(f"{step}{ocp.utils.TMP_DIR_SUFFIX}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _failure(self, step: int, error: Exception) -> OSError:
        """Error to raise for a save that failed; deletes the incomplete files."""
        self._delete_temporary(str(step))
        # Orbax leaves coroutines that have not begun, and Python warns of them when it ends.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        latest = self.latest_step()
        kept = "there is no earlier one" if latest is None else f"that of step {latest} is kept"
        cause = next(iter(str(error).strip().splitlines()), "")[:_LONGEST_CAUSE]
        return OSError(
            f"the checkpoint of step {step} can't be written to {self._folder}; {kept}: "
            f"{type(error).__name__}: {cause}. Make room there, then start again with --resume."
        )

    def _saved_facts(self, step: int) -> Facts:
        contents = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return self._checkpointer.restore(self._folder / str(step), args=contents)["facts"]

    def _check_facts(self, step: int) -> None:
        saved = self._saved_facts(step)
        names = sorted((saved.keys() | self._facts.keys()) - {LAYOUT})
        other = [
            f"{name} was {saved.get(name)!r} and is {self._facts.get(name)!r}"
            for name in names
            if saved.get(name) != self._facts.get(name)
        ]
        if other:
            raise ValueError(
                f"can't resume from step {step} in {self._folder}: {'; '.join(other)}. "
                "Give the values of the first run, or another --run-dir."
            )


def read_facts(folder: Path) -> Facts:
    """The facts in the folder of one checkpoint."""
    return _read(folder, "facts", ocp.args.JsonRestore())


def read_shapes(folder: Path) -> dict[str, Any]:
    """Shapes and types of the parameters in the folder of one checkpoint.

    Raises:
      ValueError: The folder has no state.
    """
    with ocp.Checkpointer(_reader()) as checkpointer:
        state = checkpointer.metadata(folder.absolute()).item_metadata.get("state")
    if state is None:
        raise ValueError(f"{folder} has no state: it is not a whole checkpoint of models.pretrain.")
    return state.tree["params"]


def read_params(folder: Path, shapes: dict[str, Any], shardings: Any) -> dict[str, Any]:
    """The parameters in the folder of one checkpoint; the rest of its state is not read.

    Args:
      folder: Folder of the checkpoint.
      shapes: Shapes and types of the parameters.
      shardings: Shardings of the parameters in the result.
    """
    restore = jax.tree.map(lambda sharding: ocp.ArrayRestoreArgs(sharding=sharding), shardings)
    arguments = ocp.args.PyTreeRestore(
        item={"params": shapes},  # pyright: ignore[reportCallIssue]
        restore_args={"params": restore},  # pyright: ignore[reportCallIssue]
        partial_restore=True,  # pyright: ignore[reportCallIssue]
    )
    return _read(folder, "state", arguments)["params"]


def _reader() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(), facts=ocp.JsonCheckpointHandler()
    )


def _read(folder: Path, name: str, arguments: Any) -> Any:
    with ocp.Checkpointer(_reader()) as checkpointer:
        contents = ocp.args.Composite(**{name: arguments})
        return checkpointer.restore(folder.absolute(), args=contents)[name]


def _checkpointer() -> ocp.AsyncCheckpointer:
    """Saves and restores by all processes of the job, without device programs."""
    processes = ocp.options.MultiprocessingOptions(
        primary_host=0,
        active_processes=set(range(jax.process_count())),
        barrier_sync_key_prefix="models",
    )
    # Folders are made before a save returns: the threads of all processes need not wait for them.
    background = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    # By default Orbax writes its metadata file from a thread of its own, which may still be writing
    # when the folder of a failed save is deleted.
    metadata = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=processes, async_options=background
            )
        ),
        async_options=background,
        multiprocessing_options=processes,
        checkpoint_metadata_store=metadata,
    )
