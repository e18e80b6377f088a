"""Metrics as scalars for TensorBoard: `tensorboard --logdir RUN_DIR` shows them."""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


def check_installed() -> None:
    """Checks that tensorboardX is installed.

    Raises:
      ValueError: tensorboardX is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "--tensorboard needs the package tensorboardX, which is not installed: run `pip install"
            " tensorboardX`, or leave out --tensorboard."
        )


class Scalars:
    """One event file of a run that continues after `start` steps.

    TensorBoard hides the values that older files of the folder have for later steps.
    """

    def __init__(self, folder: Path, start: int) -> None:
        # Not `SummaryWriter`, which writes in a thread: flush() does not wait for queued values,
        # and the error of a full disk ends the thread, not the run.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._messages: Any = event_pb2
        self._scalar = scalar
        self._writer = EventsWriter(str(folder / "events"), f".{start}")
        begin = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write([{"step": start + 1, "session_log": begin}])

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the numbers of rows, each with its `step`; they are on disk when this returns.

        Raises OSError if they can't be written.
        """
        self._write(
            [
                {"step": row["step"], "summary": self._scalar(name, value)}
                for row in rows
                for name, value in row.items()
                if name != "step" and isinstance(value, int | float)
            ]
        )

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        try:
            for event in events:
                self._writer.write_event(self._messages.Event(wall_time=time.time(), **event))
            self._writer.flush()
        except OSError as error:
            raise OSError(
                f"scalars for TensorBoard can't be written to {self._folder} ({error}): free some "
                "space, or leave out --tensorboard."
            ) from error
