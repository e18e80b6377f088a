"""Builds C++ programs of tests/cpp and doubles of libraries, for tests and benchmarks in Python."""

import fcntl
import functools
import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]
_BUILD = _ROOT / "_build" / "plain"


def build(name: str, folder: str = _BUILD.name, *sanitizers: str) -> pathlib.Path:
    """Builds a program of tests/cpp in a folder of _build, with the sanitizers of tools/cpp.sh."""
    _make(name, folder, *sanitizers)
    return _BUILD.parent / folder / "tests" / "cpp" / name


def results_of(printed: str) -> list[tuple[str, str]]:
    """Result ("OK", "FAILED" or "SKIPPED") and name of each test that such a program ran."""
    # A line with the time: GoogleTest names failed tests a second time, without it.
    pattern = r"^\[ +(OK|FAILED|SKIPPED) +\] ([\w/.]+).* \(\d+ ms\)$"
    return re.findall(pattern, printed, re.MULTILINE)


def softverbs(copy: str = "") -> dict[str, str]:
    """Environment in which a process finds the software libibverbs.

    Args:
      copy: Vendor whose first device copies the memory; by default the host does.
    """
    _make("softverbs")
    return {
        "LD_LIBRARY_PATH": str(_BUILD / "tests" / "softverbs"),
        "SOFTVERBS_COPY": copy,
    }


def hip_double() -> dict[str, str]:
    """The environment in which a process finds the double of AMD's libamdhip64, over CUDA."""
    _make("hip_double")
    return {"LD_LIBRARY_PATH": str(_BUILD / "tests" / "gpu")}


@functools.cache
def _make(target: str, name: str = _BUILD.name, *sanitizers: str) -> None:
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    configure = ["sh", "tools/cpp.sh", "configure", name, *sanitizers]
    make = ["cmake", "--build", str(_BUILD.parent / name), "--target", target, "--", "--quiet"]
    _BUILD.parent.mkdir(exist_ok=True)
    with (_BUILD.parent / f".{name}.lock").open("w") as lock:  # several workers may build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, make):
            subprocess.run(command, cwd=_ROOT, env=env, check=True)
