"""Folders of this repository, for jobs that tests start with `jaxhet.testing`."""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jaxhet.testing import Job, serve

ROOT = pathlib.Path(__file__).parents[2]
# The variable for subprocesses: this tree, then the folders that this process has from it.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# Gives a running job, by its shape, or the number of devices of the one world, and **env.
Start = Callable[..., Job]


def answer_and_leave(answer: Callable[[Any], Any]) -> None:
    """Serves, and ends the process without destructors of libraries: gRPC's waits 2 s."""
    serve(answer)
    sys.stdout.flush()
    os._exit(0)
