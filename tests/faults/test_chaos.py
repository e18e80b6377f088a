"""Random kills, stops, cuts, disturbances and corruptions of jobs over `shm`, `shm_ring` and `tcp`.

Twenty rounds run with the C++ tests by default; the thousands are slow, and go on where an earlier
run was cut off (`_build/unity/chaos.log`).
"""

import pathlib
import sys

import chaos
import pytest

_ROUNDS = 2_000
_CONNECTIONS = ("control", "data")
# A stand-in for chaos_test: rounds that end as their seeds say.
_STAND_IN = """
import os, subprocess, sys, time
first = int(os.environ["CHAOS_SEED"])
for seed in range(first, first + int(os.environ["CHAOS_ROUNDS"])):
    if seed == 13:
        os.abort()
    if seed == 60:
        subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL)
    if seed == 70:
        time.sleep(60)
    outcome = "finding, process 0: a wrong result" if seed == 30 else "PeerError killed"
    print(f"chaos {seed}: tcp auth, kill: {outcome} (5 ms)", file=sys.stderr, flush=True)
"""


def _program(tmp_path: pathlib.Path) -> list[str]:
    path = tmp_path / "stand_in.py"
    path.write_text(_STAND_IN)
    return [sys.executable, "-S", str(path)]


def test_run_goes_on_where_it_was_cut_off(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "chaos.log"
    log.write_text("chaos 3: shm, none: right (7 ms)\nchaos 5: tcp, stop: right (9 ms)\nchaos 6: t")
    rounds = chaos.run(_program(tmp_path), 10, log, 60, jobs=2)
    assert [known.seed for known in rounds] == [*range(1, 11)]
    assert rounds[2] == chaos.Round(3, "shm", "none", "right", 7)
    assert rounds[3] == chaos.Round(4, "tcp auth", "kill", "PeerError killed", 5)
    text = log.read_text()
    assert chaos.run(_program(tmp_path), 10, log, 60, jobs=2) == rounds
    assert log.read_text() == text


def test_no_batch_begins_after_the_time_is_over(tmp_path: pathlib.Path) -> None:
    assert chaos.run(_program(tmp_path), 10, tmp_path / "chaos.log", 0, jobs=1) == []


@pytest.mark.parametrize(
    ("seeds", "finding"),
    [
        (range(10, 15), "chaos 13: ?, ?: finding, the program ended by SIGABRT"),
        (range(28, 32), "chaos 30: tcp auth, kill: finding, process 0: a wrong result (5 ms)"),
        (range(58, 62), "chaos 61: ?, ?: finding, a process is left"),
        (range(69, 72), "chaos 70: ?, ?: finding, the program hangs"),
    ],
    ids=["crash", "wrong result", "process that is left", "hang"],
)
def test_finding_names_its_round(seeds: range, finding: str, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "chaos.log"
    chaos.run_batch(_program(tmp_path), seeds, log, longest_s=0.5)
    rounds = [*chaos.read(log).values()]
    assert [known.seed for known in rounds if known.is_finding] == [int(finding.split()[1][:-1])]
    assert finding in chaos.report(rounds)


def test_report_counts_by_fault_and_by_transport() -> None:
    ended = [("shm", "none", "right"), ("tcp", "kill", "PeerError"), ("tcp", "none", "right")]
    text = chaos.report([chaos.Round(i, *words, i) for i, words in enumerate(ended, 1)])
    assert text.startswith("3 rounds, 0 findings\n")
    assert "| 2 | none | right |" in text
    assert "| 1 | tcp | PeerError |" in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_faults_end_in_results_or_named_errors(tmp_path: pathlib.Path) -> None:
    program = chaos.build("unity")
    rounds = chaos.run([str(program)], _ROUNDS, program.parents[2] / "chaos.log", 3000, jobs=2)
    text = chaos.report(rounds)
    print(text)
    assert len(rounds) == _ROUNDS
    assert not any(known.is_finding for known in rounds), text
    connections = {f"{how} {of}" for how in ("cut", "disturb", "corrupt") for of in _CONNECTIONS}
    assert {known.fault for known in rounds} == {"none", "kill", "stop", *connections}
    assert all(known.outcome == "right" for known in rounds if known.fault == "none")
