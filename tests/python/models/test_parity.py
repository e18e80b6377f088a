import dataclasses
import hashlib
import json
import shlex
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from models.extras import parity_report, parity_runs
from models.extras.parity_runs import ISLANDS, ONE_WORLD, OTHER, PERMUTED, UNLIKE
from models.parity import parse, train

MESH = "data=2,model=2"


ORIGIN = parity_report.Origin("0123abc", "a.txt", 1234, "ffff", cpus=2, load=0.1)


def metrics(*losses: float, different: int = 0, norm: float = 2.0) -> parity_runs.Rows:
    rows = [
        {"step": step, "loss": loss, "gradient_norm": norm, "tokens_per_second": 100.0 * step}
        for step, loss in enumerate(losses, start=1)
    ]
    rows[-1]["replicas"] = {"compared": 12, "different": different}
    return rows


def write_digests(folder, *digests: str) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"step": 0, "process": d, "device": d, "digests": {"w": ["0:8", digest]}}
        for d, digest in enumerate(digests)
    ]
    (folder / "digests-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def asked(tmp_path):
    found = parse([f"--meshes={MESH}", f"--out={tmp_path}", "--steps=2", "--config=tiny"])
    for run in (ISLANDS, UNLIKE):
        write_digests(found.folder(MESH, run), "a", "a")
    return found


def checked(asked, reasons=None, **rows) -> dict[str, list[str]]:
    """The failures of each run that has some. All runs have equal metrics but those in `rows`."""
    runs = {run: metrics(4.0, 2.0) for run in asked.runs(MESH)}
    runs |= {name.replace("_", " "): given for name, given in rows.items()}
    results = parity_runs.compare(asked, MESH, runs, reasons or {})
    assert [result.run for result in results] == [*runs]
    assert parity_report.report(asked, results, ORIGIN).count("FAILED") == sum(
        bool(r.failures) for r in results
    )
    return {result.run: result.failures for result in results if result.failures}


def test_runs_that_agree_have_no_failures(asked):
    assert checked(asked) == {}


def test_norms_of_gradients_may_be_ten_tolerances_or_two_noise_floors_away(asked):
    near, far = metrics(4.0, 2.0, norm=2.0 + 1e-4), metrics(4.0, 2.0, norm=2.001)
    assert checked(asked, islands=near, unlike_islands=near) == {}
    said = ["norms of gradients differ by 5.0e-04; allowed is 1.0e-04"]
    assert checked(asked, islands=far, unlike_islands=far) == {ISLANDS: said, UNLIKE: said}
    permuted = metrics(4.0, 2.0, norm=2.0006)
    assert checked(asked, islands=far, unlike_islands=far, permuted=permuted) == {}


def test_final_differences_are_those_of_the_last_step(asked):
    later = metrics(4.0, 2.0)
    later[0] |= {"loss": 4.00001, "gradient_norm": 2.0001}
    runs = dict.fromkeys(asked.runs(MESH), metrics(4.0, 2.0)) | {ISLANDS: later}
    (islands,) = (r for r in parity_runs.compare(asked, MESH, runs, {}) if r.run == ISLANDS)
    assert islands.largest == pytest.approx(2.5e-6)
    assert islands.gradient == pytest.approx(5e-5)
    assert islands.final == islands.gradient_final == 0


def test_report_says_what_it_was_made_of(asked, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a text")
    parsed = parse([f"--data={text}", f"--out={tmp_path}"])
    origin = parity_report.Origin.of(parsed)
    assert (origin.text, origin.tokens) == ("a.txt", 6)
    assert origin.digest == hashlib.sha256(b"a text").hexdigest()
    report = parity_report.report(parsed, [], origin)
    for fact in (origin.commit, origin.digest, "a.txt, 6 tokens"):
        assert fact in report


def test_command_of_the_report_asks_for_the_same_again(tmp_path):
    words = [
        *("--meshes", "data=2", "fsdp=2", "--islands=3", "--devices=1", "--unlike=--a=1 --b=2"),
        *("--permutations=2", "--tolerance=0.5", "--steps=7", "--config=tiny", "--batch", "8"),
    ]
    asked = parse([*words, f"--out={tmp_path}"])
    said = parity_report.report(asked, [], ORIGIN).split("`")[1]
    again = parse([*shlex.split(said)[3:], f"--out={tmp_path}"])
    assert again == asked
    assert shlex.split(said)[:3] == ["python", "-m", "models.parity"]


def test_commit_is_that_of_a_checkout(tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "parity_report.py").write_text("1")
    commands = (["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"])
    assert parity_report.commit(tmp_path) == "unknown (no git checkout)"  # not its file
    for words in commands:
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.startswith(parity_report.commit(tmp_path))
    (tmp_path / "parity_report.py").write_text("2")
    assert parity_report.commit(tmp_path).endswith(" with changes")


@pytest.mark.parametrize(
    ("jobs", "load", "comparable"), [(1, 0.5, True), (1, 3.0, False), (2, 0.5, False)]
)
def test_speeds_beside_other_work_are_not_comparable(jobs, load, comparable):
    report = parity_report.report(
        parse([f"--jobs={jobs}"]), [], dataclasses.replace(ORIGIN, load=load)
    )
    assert ("**not comparable**" not in report) == comparable


def test_losses_of_islands_are_compared_with_the_tolerance(asked):
    assert checked(asked, islands=metrics(4.0, 2.0 + 1e-5)) == {}
    assert checked(asked, islands=metrics(4.0 + 1e-4, 2.0)) == {
        ISLANDS: ["losses differ by 2.5e-05; allowed is 1.0e-05"]
    }
    assert checked(asked, islands=metrics(float("nan"), 2.0)) == {
        ISLANDS: ["losses differ by nan; allowed is 1.0e-05"]
    }


def test_unlike_islands_may_be_two_noise_floors_away(asked):
    away = metrics(4.0, 2.0004)
    assert [*checked(asked, unlike_islands=away)] == [UNLIKE]
    assert checked(asked, unlike_islands=away, permuted=metrics(4.0, 2.0002)) == {}
    assert [*checked(asked, islands=away, permuted=metrics(4.0, 2.0002))] == [ISLANDS]


def test_noise_floor_is_the_largest_of_all_permutations(asked):
    away = metrics(4.0, 2.0004, norm=2.001)
    largest = metrics(4.0, 2.0002, norm=2.0006)
    for run in ("permuted", "permuted_2", "permuted_4"):
        assert checked(asked, unlike_islands=away, **{run: largest}) == {}
    # The floors of losses and of norms may be those of different runs.
    floors = {"permuted_3": metrics(4.0, 2.0002), "permuted_2": metrics(4.0, 2.0, norm=2.0006)}
    assert checked(asked, unlike_islands=away, **floors) == {}
    failed = checked(asked, {"permuted 2": "exit code 1"}, unlike_islands=away, permuted_2=largest)
    assert failed["permuted 2"] == ["exit code 1"]


def test_other_arithmetic_is_part_of_the_noise_floor_of_unlike_islands_only(asked):
    away, other = metrics(4.0, 2.0004, norm=2.001), metrics(4.0, 2.0002, norm=2.0006)
    assert checked(asked, unlike_islands=away, other_arithmetic=other) == {}
    said = ["norms of gradients differ by 5.0e-04; allowed is 1.0e-04"]
    failed = checked(asked, islands=metrics(4.0, 2.0, norm=2.001), other_arithmetic=other)
    assert failed == {ISLANDS: said}


def test_replicas_must_be_there_and_equal(asked):
    assert checked(asked, islands=metrics(4.0, 2.0, different=3)) == {
        ISLANDS: ["3 replicas differed during the run"]
    }
    for run in (ISLANDS, UNLIKE):
        path = asked.folder(MESH, run) / "digests-0.jsonl"
        path.write_text(path.read_text().replace('"a"', '"b"', 1))
    expected = ["parameters differ: step 0, w[0:8]: devices 0, 1 differ"]
    assert checked(asked) == {ISLANDS: expected, UNLIKE: expected}


def test_failed_and_short_runs_are_named(asked):
    reasons = {ISLANDS: "exit code 3: PeerError"}
    assert checked(asked, reasons, unlike_islands=metrics(4.0), islands=[]) == {
        ISLANDS: ["exit code 3: PeerError"],
        UNLIKE: ["1 steps are in its metrics, and 2 in the one world's"],
    }


def test_failed_run_is_told_with_the_line_that_says_why(asked):
    said = """
[island0/0] models.pretrain: no mesh
jaxhet launch: failed first: process 0 (island0): exit code 3; it said: models.pretrain: no mesh
  process 1 (island1): exit code 3
  the first failure was 0.5 s after the start
"""

    def failure(text: str) -> str:
        program = f"import sys; print({text!r}, file=sys.stderr); sys.exit(3)"
        rows, reason = train(asked, MESH, ONE_WORLD, [sys.executable, "-c", program])
        assert rows == []
        return reason

    assert failure(said) == (
        "exit code 3: jaxhet launch: failed first: process 0 (island0): exit code 3; it said: "
        "models.pretrain: no mesh"
    )
    assert failure("first\nlast\n\n") == "exit code 3: last"
    assert failure("") == "exit code 3: it said nothing"


def test_runs_differ_in_what_they_are_named_after(asked):
    commands = asked.runs(MESH)
    assert all(f"--mesh={MESH}" in command for command in commands.values())
    assert all("--config=tiny" in command for command in commands.values())
    assert [run for run, command in commands.items() if "launch" in command] == [ISLANDS, UNLIKE]
    permuted = [PERMUTED, "permuted 2", "permuted 3", "permuted 4"]
    assert [*commands] == [ONE_WORLD, *permuted, OTHER, ISLANDS, UNLIKE]
    assert [commands[run][-1] for run in permuted] == [f"--permute={n}" for n in (1, 2, 3, 4)]
    few = parse(["--permutations=1", "--unlike="]).runs(MESH)
    assert [*few] == [ONE_WORLD, PERMUTED, ISLANDS]


@pytest.mark.parametrize("words", [["--stages=3,1"], ["--stages", "3,1"]])
def test_only_meshes_with_stages_have_the_option(words):
    asked = parse(["--meshes", "stage=2,data=2", "data=4", "--batch=8", *words, "--seed=1"])
    with_stages, without = (set(asked.runs(mesh)[ISLANDS]) for mesh in asked.meshes)
    assert "--stages=3,1" in with_stages
    assert not without & {"--stages", "3,1", "--stages=3,1"}
    assert {"--batch=8", "--seed=1"} <= without
    assert parse(asked.words()).words() == asked.words()


def test_unlike_island_has_its_flags_beside_those_of_all_runs(asked, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    command = asked.runs(MESH)[UNLIKE]
    assert "--island-env=island1:XLA_FLAGS=--xla_a=1 --xla_cpu_max_isa=AVX" in command
    assert asked.environment(OTHER)["XLA_FLAGS"] == "--xla_a=1 --xla_cpu_max_isa=AVX"
    assert {asked.environment(run)["XLA_FLAGS"] for run in (ONE_WORLD, UNLIKE)} == {"--xla_a=1"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run-dir=x"], "--run-dir is set for each run: leave it out"),
        (["--permutations=0"], "--permutations 0: the noise floor needs at least 1"),
        (["--jobs=0"], "--jobs 0: at least 1 run at a time"),
        (["--islands=1"], "--islands 1 and --devices 2: give at least 2 islands, and 1 device"),
        (["--devices=0"], "--islands 2 and --devices 0: give at least 2 islands, and 1 device"),
        (["--tolerance=-1"], "--tolerance -1.0: give a number above 0"),
        (["--meshes", "data"], "is not of the form data=2,model=2"),
    ],
)
def test_wrong_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_report_of_real_runs(tmp_path):
    words = [
        "--meshes",
        "data=4",
        MESH,
        "--steps=6",
        "--log-every=3",
        "--jobs=2",
        "--permutations=1",
    ]
    command = [sys.executable, "-m", "models.parity", *words, f"--out={tmp_path}"]
    command += ["--config=tiny-qwen", "--batch=8"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [(r["mesh"], r["run"]) for r in results[:2]] == [
        ("data=4", ONE_WORLD),
        ("data=4", PERMUTED),
    ]
    assert len(results) == 10
    assert not any(r["failures"] for r in results)
    assert {r["replicas"]["compared"] > 0 for r in results if r["run"] in (ISLANDS, UNLIKE)} == {
        True
    }
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_plot_names_runs_whose_losses_are_all_equal(tmp_path, monkeypatch):
    legends: list[list[str]] = []

    def note(figure: Figure, path: object, **_: object) -> None:
        legend = figure.axes[1].get_legend()
        legends.append([text.get_text() for text in legend.get_texts()] if legend else [])

    monkeypatch.setattr(Figure, "savefig", note)
    one = metrics(3.0, 2.0)
    parity_report.plot(
        tmp_path / "plot.png",
        {"data=2": {ONE_WORLD: one, ISLANDS: one, PERMUTED: metrics(3.0, 2.1)}},
    )
    parity_report.plot(tmp_path / "plot.png", {"data=2": {ONE_WORLD: one, PERMUTED: metrics(3, 1)}})
    assert legends == [[f"{ISLANDS}: equal in all steps"], []]
