"""`jaxhet.balanced_value_and_grad` over islands of unequal size and of unlike arithmetic."""

import pathlib
import subprocess
import sys

from tests.support.jobs import PYTHONPATH, ROOT
from tests.support.scripts import environment

# Expensive passes would be half of the test's time. Without optimization there is no FMA.
_FAST = "--xla_llvm_disable_expensive_passes=true"
_UNLIKE = f"island1:XLA_FLAGS={_FAST} --xla_cpu_max_isa=AVX"


def test_unequal_shares_have_the_gradients_of_one_world_and_equal_replicas() -> None:
    program = pathlib.Path(__file__).with_name("balanced_programs.py")
    launch = ("jaxhet.cli", "launch", "--devices", "4,2", "--island-env", _UNLIKE, "--")
    ended = subprocess.run(
        [sys.executable, "-m", *launch, sys.executable, str(program)],
        cwd=ROOT,
        env={**environment(), "XLA_FLAGS": _FAST, "PYTHONPATH": PYTHONPATH},
        text=True,
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("balanced: all right") == 2
