"""`jaxhet.saving`: a save that makes progress is not cut off after a failure of the job."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from jaxhet import _session
from jaxhet._errors import UsageError
from jaxhet._saves import Save


@contextlib.contextmanager
def saving(folder: str | os.PathLike[str], *, limit_s: float = 600.0) -> Iterator[None]:
    """Protects a save from the end of the process after a failure of the job.

    jaxhet ends a process that has not noticed a failure for a tenth of JAXHET_EXIT_TIMEOUT_S.
    Inside this context that time begins anew with each change below `folder`: a file or folder
    appears, grows, is written, renamed or deleted. Waits at JAX's barriers, which are cancelled
    after a failure, are left alone until nothing has changed for 1 s. Contexts may overlap, and may
    be left by another thread than the one that entered them. Outside of a job they do nothing.
    `jaxhet launch` waits for the save, unless `--grace` limits the time after the first failure.

    Args:
      folder: Folder, or single file, that the save writes, in a mounted file system. It may not be
        there yet. Everything below it counts, whoever changes it.
      limit_s: Longest time that the save may go on after the failure, in seconds; then the process
        is ended although the save makes progress.

    Raises:
      UsageError: `folder` is a URL, whose changes can't be seen, or `limit_s` is below 0.
    """
    if "://" in os.fspath(folder):
        raise UsageError(
            f"jaxhet.saving can't see the progress of a save to {os.fspath(folder)!r}: give it a"
            " folder of a mounted file system, or set JAXHET_EXIT_TIMEOUT_S to more than"
            " ten times the time of a save"
        )
    if limit_s < 0:
        raise UsageError(f"limit_s={limit_s!r} of jaxhet.saving is below 0 seconds")
    session = _session.current()
    if session is None:
        yield
        return
    with session.saves.under_way(Save(pathlib.Path(folder).absolute(), limit_s)):
        yield
