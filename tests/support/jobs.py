"""Folders of this repository, for jobs that tests start with `jaxhet.testing`."""

import os
import pathlib
from collections.abc import Callable

from jaxhet.testing import Job

ROOT = pathlib.Path(__file__).parents[2]
# The variable for subprocesses: this tree, then the folders that this process has from it.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# Gives a running job, by its shape, or the number of devices of the one world, and **env.
Start = Callable[..., Job]
