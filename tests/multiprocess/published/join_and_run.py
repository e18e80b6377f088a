"""Runs a program that does not join a job itself, in the job that this process finds.

    join_and_run.py PROGRAM [ARGUMENT...]

The program is a file of Python or a notebook, whose cells of code are run in order, without those
that begin with a command of IPython. NumPy's generator has a seed, the same in all processes.
"""

import json
import pathlib
import sys

import jax
import numpy as np


def _source(path: pathlib.Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(source for source in sources if not source.startswith(("!", "%")))


def main() -> None:
    sys.argv = sys.argv[1:]
    path = pathlib.Path(sys.argv[0])
    sys.path[0] = str(path.parent.resolve())
    np.random.seed(0)
    jax.distributed.initialize()
    sys.modules["__main__"].__file__ = str(path)
    exec(compile(_source(path), str(path), "exec"), sys.modules["__main__"].__dict__)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
