"""Folders of this repository, for jobs that tests start with `jaxhet.testing`."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
# The variable for subprocesses: this tree, then the folders that this process has from it.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
