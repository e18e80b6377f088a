import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import mesh_sweep
from models.pretrain import parse
from models.records import METRICS

SWEEP = mesh_sweep.Sweep(
    config="tiny",
    meshes=("data=4", "fsdp=3"),
    dtype="float32",
    islands=2,
    devices=2,
    steps=3,
    batch=8,
    seq=16,
    run_dir=Path("runs"),
)
METRIC = {"loss": 2.0, "exchanges_completed": 5, "bytes_sent_shm": 3e6, "bytes_sent_tcp": 1e6}
SECONDS = (9.0, 5.0, 0.4, 0.5, 0.9)


def rows() -> list[dict[str, float]]:
    return [{"step": step, "seconds": s, **METRIC} for step, s in enumerate(SECONDS, start=1)]


def test_command_trains_on_the_mesh_of_the_job():
    words = SWEEP.command("data=4")
    options = parse(words[words.index("models.pretrain") + 1 :])
    assert (options.mesh, options.steps, options.log_every) == ("data=4", 5, 1)
    assert words[words.index("--islands") + 1] == "2"


def test_summary_is_the_median_of_the_steps_after_the_first():
    row = mesh_sweep.summary("data=4", rows(), tokens=128)
    assert row == mesh_sweep.Row("data=4", 4e6, 5, 0.5, 256, 2.0)


def test_results_are_a_table_json_and_a_plot(monkeypatch, tmp_path, capsys):
    def measure(sweep: mesh_sweep.Sweep, mesh: str) -> mesh_sweep.Row | str:
        if mesh == "fsdp=3":
            return "choose another"
        return mesh_sweep.summary(mesh, rows(), sweep.batch * sweep.seq)

    monkeypatch.setattr(mesh_sweep, "measure", measure)
    assert mesh_sweep.run(SWEEP, tmp_path / "rows", tmp_path / "plot") == 1
    said = capsys.readouterr().out
    assert "500.0" in said
    assert "fsdp=3 failed: choose another" in said
    assert json.loads((tmp_path / "rows").read_text())[0]["bytes_across"] == 4e6
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit('p0| models.pretrain: too large')", "too large"),
        ("exit(3)", "exit code 3"),
    ],
)
def test_run_that_fails_says_why(code, expected, monkeypatch, tmp_path):
    words = [sys.executable, "-c", code]
    monkeypatch.setattr(mesh_sweep.Sweep, "command", lambda *_: words)
    sweep = dataclasses.replace(SWEEP, run_dir=tmp_path)
    assert mesh_sweep.measure(sweep, "data=4") == expected


def test_run_is_summed_up_from_its_metrics(monkeypatch, tmp_path):
    write = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True); "
    write += "p.write_text(sys.argv[2])"
    text = "".join(json.dumps(row) + "\n" for row in rows())
    words = [sys.executable, "-c", write, str(tmp_path / "data=4" / METRICS), text]
    monkeypatch.setattr(mesh_sweep.Sweep, "command", lambda *_: words)
    sweep = dataclasses.replace(SWEEP, run_dir=tmp_path)
    assert isinstance(row := mesh_sweep.measure(sweep, "data=4"), mesh_sweep.Row)
    assert row.step_s_p50 == 0.5
