"""JAX's own multi-process tests over two islands of one GPU each, with default settings.

The folder `tests/multiprocess` of JAX's repository, at the installed version, must be in
`.cache/programs/jax/tests/`; no package has it. Beside JAX the tests need pytest only:

    pytest -s tests/gpu/test_tests_of_jax_on_gpus.py -k cuda

prints how many tests of each file passed, were skipped and failed. `-m slow -k cpu` runs the same
files over islands of two processes on CPUs. With one process in each island two tests of arrays
fail, also in plain JAX, which skips them on GPUs.
"""

from collections import Counter

import pytest

from tests.gpu.scripts_on_gpus import ON_BOTH, require_gpus
from tests.support import published

_FOLDER = "jax/tests/multiprocess"
_FILES = (
    "array",
    "pjit",
    "pmap",
    "multihost_utils",
    "axis_index",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "key_value_store",
    "host_callback",
)
_PASSED = 80  # fewest tests; jax 0.11.2 has 87 that run on two GPUs
_FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def _table(outcomes: dict[str, str]) -> str:
    """Counts of outcomes by file."""
    counts = Counter(
        (name.split("_test.")[0], outcome.split(":")[0]) for name, outcome in outcomes.items()
    )
    rows = [f"{'file':16} passed skipped failed"]
    for file in _FILES:
        passed, skipped, failed = (counts[file, kind] for kind in ("passed", "skipped", "failed"))
        rows.append(f"{file:16} {passed:6} {skipped:7} {failed:6}")
    return "\n".join(rows)


@pytest.mark.timeout(600)
@ON_BOTH
def test_islands_pass_tests_of_jax(platform: str) -> None:
    require_gpus(platform)
    if reason := published.missing(f"{_FOLDER}/array_test.py"):
        pytest.skip(reason)
    files = [str(published.find(f"{_FOLDER}/{name}_test.py")) for name in _FILES]
    # An empty JAX_PLATFORMS lets JAX choose, as it does by default.
    env, processes = (_FAST, 2) if platform == "cpu" else ({"JAX_PLATFORMS": ""}, 1)
    command = [str(published.HERE / "jax_tests.py"), *files]
    texts = published.over_islands(command, env, published.Run(1, processes, timeout_s=550))
    outcomes = published.outcomes_of_jax_tests(texts)
    print(f"\n{_table(outcomes)}")
    failed = {name: text for name, text in outcomes.items() if text.startswith("failed")}
    assert not failed, failed
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= _PASSED
