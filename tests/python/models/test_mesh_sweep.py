import dataclasses
import json
import sys
from pathlib import Path

from benchmarks import mesh_sweep
from benchmarks.mesh_report import Measured
from models.extras.records import METRICS

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
METRIC = {
    "loss": 2.0,
    "exchanges_completed": 6,
    "bytes_sent_process_vm": 3e6,
    "bytes_sent_socket": 1e6,
}
SECONDS = (9.0, 5.0, 0.4, 0.5, 0.9)


def rows() -> list[dict[str, float]]:
    return [{"step": step, "seconds": s, **METRIC} for step, s in enumerate(SECONDS, start=1)]


def test_run_is_summed_up_from_its_metrics(monkeypatch, tmp_path):
    write = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True); "
    write += "p.write_text(sys.argv[2])"
    text = "".join(json.dumps(row) + "\n" for row in rows())
    words = [sys.executable, "-c", write, str(tmp_path / "data=4" / METRICS), text]
    monkeypatch.setattr(mesh_sweep.Sweep, "command", lambda *_: words)
    sweep = dataclasses.replace(SWEEP, run_dir=tmp_path)
    assert isinstance(row := mesh_sweep.measure(sweep, "data=4"), Measured)
    assert row.seconds == 0.5
