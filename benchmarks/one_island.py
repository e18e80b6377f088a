"""Step times of a program of one island, in plain Python and under `jaxhet run`.

    python -m benchmarks.one_island [--turns 40] [--steps 10] [--json FILE]

Three jobs run one training loop in plain JAX: two by `python`, and one by `jaxhet run`. They are
alive at the same time and take turns. The slowest process determines the time of a step; CPU times
of all processes are added. Each ratio is a job's median divided by the first job's. The ratio of
the second job, which is also plain Python, shows the noise.
"""

import argparse
import os
import pathlib
import statistics
import sys

from benchmarks.tables import made_at, markdown, write_json
from jaxhet.testing import Job, Shape, free_port, import_path

WORKER = str(pathlib.Path(__file__).with_name("one_island_worker.py"))
SHAPES = (Shape(1, 1, 2), Shape(1, 2, 1))
_PLAIN, _AGAIN, _RUN = SYSTEMS = ("python", "python, again", "jaxhet run")
_WARM_UP = 5


def start(system: str, shape: Shape) -> Job:
    """The job of one system."""
    address, number = f"127.0.0.1:{free_port()}", str(shape.num_processes)
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAXHET_")}
    env |= {"PYTHONPATH": import_path(), "JAX_PLATFORMS": "cpu", "JAXHET_JOB_SECRET": "ab" * 32}
    commands = []
    for process, devices in enumerate(shape.devices_of_processes):
        place = ["--coordinator", address, "--num-processes", number, "--process-id", str(process)]
        run = [sys.executable, "-m", "jaxhet.cli", "run", *place, "--island", "one", "--"]
        program = [sys.executable, WORKER, address, number, str(process), str(devices)]
        commands.append(([*(run if system == _RUN else ()), *program], env))
    return Job(commands, shape.num_processes)


def measure(shape: Shape, turns: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each step, by system."""
    jobs = {system: start(system, shape) for system in SYSTEMS}
    times: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    try:
        for job in jobs.values():
            job.ask(_WARM_UP)
        for turn in range(turns):
            for system in SYSTEMS[turn % 3 :] + SYSTEMS[: turn % 3]:
                for of_processes in zip(*jobs[system].ask(steps), strict=True):
                    wall, cpu = zip(*of_processes, strict=True)
                    times[system].append((max(wall), sum(cpu)))
    finally:
        for job in jobs.values():
            job.close()
    return times


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path, help="file for the times, in seconds")
    args = parser.parse_args()
    rows, found = [], []
    for shape in SHAPES:
        times = measure(shape, args.turns, args.steps)
        medians = {s: [statistics.median(c) for c in zip(*times[s], strict=True)] for s in SYSTEMS}
        for system, (wall, cpu) in medians.items():
            ratios = (wall / medians[_PLAIN][0], cpu / medians[_PLAIN][1])
            cells = [
                f"{wall * 1e3:.1f}",
                f"{ratios[0]:.3f}",
                f"{cpu * 1e3:.1f}",
                f"{ratios[1]:.3f}",
            ]
            rows.append([f"{shape.num_processes} × {shape.devices}", system, *cells])
        found.append({"shape": str(shape), "times": times})
    headings = ("processes × devices", "command", "step, ms", "ratio", "CPU, ms", "ratio")
    print(markdown(headings, rows))
    print(f"{args.turns} turns of {args.steps} steps. {made_at()}")
    write_json(args.json, {"shapes": found}, [])


if __name__ == "__main__":
    main()
