"""Random faults on jobs of the C++ engine, by the thousand: counts by transport, fault and outcome.

    python tests/faults/chaos.py [--rounds N] [--seconds S] [--jobs N] [--build NAME] [--log FILE]

Runs the rounds 1 to N of `tests/cpp/chaos_test.cc`, each known by its seed. The log has a line for
each round; rounds that are in it are not run again, so that a run can be cut off and go on later.
Exits with 1 if a round is a finding: a wrong result, a hang, a crash, an unnamed error, or
something that is left behind.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

_ROOT = pathlib.Path(__file__).parents[2]
SANITIZERS = {"unity": (), "asan": ("address,undefined",), "tsan": ("thread",)}  # by build
_BATCH = 50  # rounds of one process
_LONGEST_ROUND_S = 30.0  # chaos_test gives up its processes before
_LINE = re.compile(r"^chaos (\d+): (.*?), (.*?): (.*) \((\d+) ms\)$", re.MULTILINE)
_FINDING = "finding"


@dataclasses.dataclass(frozen=True)
class Round:
    """A line of the log.

    Attributes:
      seed: Number that makes the round again.
      path: Transport and encryption.
      fault: Fault of one process or connection.
      outcome: How its processes ended, or "finding" and why.
      time_ms: Time of the whole round.
    """

    seed: int
    path: str
    fault: str
    outcome: str
    time_ms: int

    @property
    def is_finding(self) -> bool:
        return self.outcome.startswith(_FINDING)

    def __str__(self) -> str:
        return f"chaos {self.seed}: {self.path}, {self.fault}: {self.outcome} ({self.time_ms} ms)"


def build(name: str, program: str = "chaos_test") -> pathlib.Path:
    """Builds a program of `tests/cpp`, with the sanitizers of `SANITIZERS`; returns its path."""
    folder = _ROOT / "_build" / name
    configure = ["sh", "tools/cpp.sh", "configure", name, *SANITIZERS[name]]
    subprocess.run(configure, cwd=_ROOT, check=True)
    target = ["cmake", "--build", str(folder), "--target", program, "--", "--quiet"]
    path = f"{_ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the cmake and ninja there
    subprocess.run(target, cwd=_ROOT, check=True, env={**os.environ, "PATH": path})
    return folder / "tests" / "cpp" / program


def read(log: pathlib.Path) -> dict[int, Round]:
    """Rounds of a log, by seed; of two lines with one seed the later one."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return {
        int(seed): Round(int(seed), path, fault, outcome, int(time_ms))
        for seed, path, fault, outcome, time_ms in _LINE.findall(text)
    }


def run_batch(
    program: Sequence[str], seeds: range, log: pathlib.Path, longest_s: float = _LONGEST_ROUND_S
) -> None:
    """Runs rounds in one process, which adds their lines to the log.

    A crash, a hang or processes that are left are findings of the first round without a line, or
    else of the last round.
    """
    env = {**os.environ, "CHAOS_SEED": str(seeds[0]), "CHAOS_ROUNDS": str(len(seeds))}
    env["TSAN_OPTIONS"] = env["ASAN_OPTIONS"] = "exitcode=99"
    begin = time.monotonic()
    with log.open("ab", buffering=0) as out:
        out.write(b"\n")  # a line before may be cut
        process = subprocess.Popen(
            [*program, "--gtest_filter=*.RandomFaults*"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=out,
            start_new_session=True,
        )
        try:
            problem = _problem(process.wait(longest_s * len(seeds)))
        except subprocess.TimeoutExpired:
            problem = "the program hangs"
        if _kill_all(process.pid):
            problem = problem or "a process is left"
        process.wait()
    known = read(log)
    if problem and not any(known[seed].is_finding for seed in seeds if seed in known):
        seed = next((seed for seed in seeds if seed not in known), seeds[-1])
        time_ms = round((time.monotonic() - begin) * 1000)
        with log.open("a") as out:
            print(f"\n{Round(seed, '?', '?', f'{_FINDING}, {problem}', time_ms)}", file=out)


def _problem(code: int) -> str:
    """Why a program has ended; "" for a good end."""
    if code < 0:
        return f"the program ended by {signal.Signals(-code).name}"
    return f"the program ended with code {code}" if code else ""


def _kill_all(session: int) -> bool:
    """Kills the processes of a session; whether there was any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
        return True
    return False


def run(
    program: Sequence[str], rounds: int, log: pathlib.Path, seconds: float, jobs: int
) -> list[Round]:
    """Runs the rounds that the log lacks; returns those of the log.

    Args:
      program: Command of chaos_test.
      rounds: Number of rounds, from seed 1.
      log: File of the rounds' lines.
      seconds: Time after which no further batch is begun.
      jobs: Number of batches at a time.
    """
    deadline = time.monotonic() + seconds

    def run_in_time(seeds: range) -> None:
        if time.monotonic() < deadline:
            run_batch(program, seeds, log)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_in_time, _batches(set(range(1, rounds + 1)) - read(log).keys())))
    return [known for seed, known in sorted(read(log).items()) if seed <= rounds]


def _batches(seeds: Iterable[int]) -> list[range]:
    """Ranges of at most `_BATCH` consecutive seeds."""
    batches: list[range] = []
    for seed in sorted(seeds):
        if batches and batches[-1].stop == seed and len(batches[-1]) < _BATCH:
            batches[-1] = range(batches[-1].start, seed + 1)
        else:
            batches.append(range(seed, seed + 1))
    return batches


def report(rounds: Sequence[Round]) -> str:
    """Counts by fault and outcome, and by transport; findings in full; the longest rounds."""
    good = [known for known in rounds if not known.is_finding]
    lines = [f"{len(rounds)} rounds, {len(rounds) - len(good)} findings"]
    for name in ("fault", "path"):
        counts = Counter((getattr(known, name), known.outcome) for known in good)
        lines += ["", f"| rounds | {name} | processes ended |", "|---|---|---|"]
        lines += [f"| {counts[key]} | {key[0]} | {key[1]} |" for key in sorted(counts)]
    slowest = sorted(good, key=lambda known: known.time_ms)[-3:]
    lines += ["", "longest rounds:", *map(str, slowest)]
    return "\n".join([*lines, *(str(known) for known in rounds if known.is_finding)])


def main() -> int:
    """Runs rounds and prints the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10_000, help="default 10,000")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="default: no limit")
    parser.add_argument("--jobs", type=int, default=2, help="batches at a time; default 2")
    parser.add_argument("--build", choices=SANITIZERS, default="unity", help="default unity")
    parser.add_argument("--log", type=pathlib.Path, help="default _build/BUILD/chaos.log")
    args = parser.parse_args()
    program = build(args.build)
    log = args.log or _ROOT / "_build" / args.build / "chaos.log"
    rounds = run([str(program)], args.rounds, log, args.seconds, args.jobs)
    print(report(rounds))
    return int(any(known.is_finding for known in rounds))


if __name__ == "__main__":
    sys.exit(main())
