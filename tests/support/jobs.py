"""Folders of this repository, for jobs that tests start with `jaxhet.testing`."""

import os
import pathlib
from collections.abc import Callable

from jaxhet.testing import Job

ROOT = pathlib.Path(__file__).parents[2]
# For subprocesses: this tree, then what this process was given.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# Gives a running job, by its shape, or the number of devices of the one world, and **env.
Start = Callable[..., Job]
