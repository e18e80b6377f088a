"""The programs of tests/cpp, which guests run."""

import functools
import os
import pathlib
import subprocess
import sys

from tests.rdma_vm.image import ROOT

_BUILD = ROOT / "_build" / "plain"


@functools.cache
def build(name: str) -> pathlib.Path:
    """Builds one, in the folder that `make test` builds them in."""
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    configure = ["sh", "tools/cpp.sh", "configure", _BUILD.name]
    make = ["cmake", "--build", str(_BUILD), "--target", name, "--", "--quiet"]
    for command in (configure, make):
        subprocess.run(command, cwd=ROOT, env=env, check=True)
    return _BUILD / "tests" / "cpp" / name
