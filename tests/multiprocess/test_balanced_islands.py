"""`jaxhet.balanced_value_and_grad` over islands of unequal size and of unlike arithmetic."""

import pathlib

from tests.support.commands import launch, python

# Expensive passes would be half of the test's time. Without optimization there is no FMA.
_FAST = "--xla_llvm_disable_expensive_passes=true"
_UNLIKE = f"island1:XLA_FLAGS={_FAST} --xla_cpu_max_isa=AVX"


def test_unequal_shares_have_the_gradients_of_one_world_and_equal_replicas() -> None:
    program = pathlib.Path(__file__).with_name("balanced_programs.py")
    job = launch("--devices=4,2", f"--island-env={_UNLIKE}")
    ended = python(*job, program, env={"XLA_FLAGS": _FAST})
    assert ended.stdout.count("balanced: all right") == 2
