"""Cost of jaxhet's defaults for a program that does not need them: a step inside of one island.

XLA tunes its kernels, as by default: without tuning, the large products of
benchmarks/plain_llama.py are many times slower.
"""

import statistics

import pytest

from benchmarks import gpu_jobs, gpu_train, gpus
from benchmarks.training import Program
from jaxhet.testing import Shape

MOST_SLOWER = 1.03
REPEATS, STEPS = 5, 8


@pytest.mark.timeout(600)
def test_step_of_a_plain_program_on_one_island_takes_as_long_as_without_jaxhet() -> None:
    if reason := gpus.why_fewer_than(2):
        pytest.skip(reason)
    setting = gpu_jobs.Setting("cuda", Shape(2, 1, 1))
    program = Program("plain", "data=-1", scan=True, batch=8, seq=2048, layers=4)
    seconds: dict[str, list[float]] = {"cuda_ipc": [], "nccl": []}
    with gpu_jobs.running([*seconds], setting, gpu_train.WORKER) as systems:
        for _ in range(REPEATS):
            for system, times in seconds.items():
                answers = systems.ask(system, ("alone", program, 2, STEPS), 300)
                assert answers is not None, systems.failures
                times.append(max(answers))
    medians = {system: statistics.median(times) for system, times in seconds.items()}
    ratio = medians["cuda_ipc"] / medians["nccl"]
    told = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in medians.items())
    print(f"{told}, ratio {ratio:.3f}")
    assert ratio <= MOST_SLOWER, told
