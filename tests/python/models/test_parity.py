import json
import sys

import pytest

from models.extras import parity_report, parity_runs
from models.extras.parity_runs import ISLANDS, ONE_WORLD, PERMUTED, UNLIKE
from models.parity import parse, train
from tests.support.commands import python

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run-dir=x"], "--run-dir is set for each run: leave it out"),
        (["--permutations=0"], "--permutations 0: the noise floor needs at least 1"),
        (["--devices=0"], "--islands 2 and --devices 0: give at least 2 islands, and 1 device"),
        (["--meshes", "data"], "is not of the form data=2,model=2"),
    ],
)
def test_wrong_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert said in capsys.readouterr().err


def test_thin_runs_are_shown_beside_the_others_without_a_bar(tmp_path):
    thin = ["--wire=mxint8", "--diloco --wire=mxint4"]
    words = [f"--meshes={MESH}", f"--out={tmp_path}", "--unlike=", *(f"--thin={t}" for t in thin)]
    asked = parse(words)
    assert parse([*asked.words(), f"--out={tmp_path}"]) == asked
    names = [f"{ISLANDS}, {options}" for options in thin]
    commands = asked.runs(MESH)
    assert [*commands][-3:] == [ISLANDS, *names]
    extra = [set(commands[name]) - set(commands[ISLANDS]) for name in names]
    for options, words in zip(thin, extra, strict=True):
        assert {w for w in words if not w.startswith("--run-dir=")} == set(options.split())
    for name in (ISLANDS, *names):
        write_digests(asked.folder(MESH, name), "a", "a")
    assert checked(asked, **{names[1]: metrics(4.0, 3.0)}) == {}
    found = checked(asked, **{names[0]: metrics(4.0, 3.0, different=2)})
    assert found == {names[0]: ["2 replicas differed during the run"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_report_of_real_runs(tmp_path):
    words = f"--meshes data=4 {MESH} --steps=6 --log-every=3 --jobs=2 --permutations=1"
    model = ("--config=tiny-qwen", "--batch=8", f"--out={tmp_path}")
    python("-m", "models.parity", *words.split(), *model, timeout_s=850, env={"XLA_FLAGS": ""})
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
