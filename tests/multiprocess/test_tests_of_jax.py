"""JAX's own multi-process tests over two islands: the outcomes of plain JAX, and what differs."""

import pytest

from tests.support import published

_TESTS = "jax/tests/multiprocess/*_test.py"
# Tests that plain JAX passes and islands do not, and the reason.
_DIFFERENT = {
    "ThreadGuardTest.test_thread_guard": "UsageError: jit(f) exchanges data over islands and was"
    " called by thread",  # only one thread may call such programs
    "WaitBarrierTest.test_non_participant_calls_fails": "JaxRuntimeError not raised",  # the
    # coordinator, a further node of JAX's service, is not in the test's list of processes
}
_LAYOUTS = ((1, 2), (2, 1), (1, 4), (2, 2))  # processes of an island, devices of a process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        bool(published.missing(_TESTS)), reason=published.missing(_TESTS) or "there"
    ),
]


@pytest.mark.parametrize(("processes", "devices"), _LAYOUTS)
def test_islands_pass_the_tests_that_plain_jax_passes(processes: int, devices: int) -> None:
    files = sorted(map(str, published.FOLDER.glob(_TESTS)))
    command = [str(published.HERE / "jax_tests.py"), *files]
    env = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = published.Run(devices, processes, timeout_s=1700)
    world = published.outcomes_of_jax_tests(published.in_plain_world(command, env, run))
    mine = published.outcomes_of_jax_tests(published.over_islands(command, env, run))
    assert mine.keys() == world.keys()
    passed = {name for name, outcome in world.items() if outcome == "passed"}
    failed = {name: mine[name] for name in passed if mine[name] != "passed"}
    kinds = [outcome.split(":")[0] for outcome in world.values()]
    print({kind: kinds.count(kind) for kind in set(kinds)}, len(passed) - len(failed), failed)
    assert len(passed) > 50
    for name, outcome in failed.items():
        assert _DIFFERENT.get(name.partition(".")[2], "no reason known") in outcome, name
