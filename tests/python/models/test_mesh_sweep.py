import dataclasses
import json
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import mesh_sweep
from benchmarks.mesh_report import Measured, Planned
from models.configs import CONFIGS
from models.extras.records import METRICS
from models.train import Schedule, Trainer
from tests.python.compiler.install_plugins import PLUGINS

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


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["cpu", "cuda"])
def test_mesh_is_planned(vendor, make_mesh, monkeypatch, tmp_path):
    if vendor == "cuda" and not PLUGINS.exists():
        pytest.skip(f"{PLUGINS} is missing: python tests/python/compiler/install_plugins.py")
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    sweep = dataclasses.replace(SWEEP, run_dir=tmp_path, plan=vendor)
    row = mesh_sweep.measure(sweep, "data=4")
    assert isinstance(row, Planned), row
    assert row.is_exact
    latency, bandwidth = sweep.latency_us * 1e-6, sweep.link_gb_per_s * 1e9
    seconds = row.exchanges * latency + row.bytes_across / bandwidth
    assert row.seconds == pytest.approx(seconds)
    # A gradient is the same on both ranks of an island: each sends at least half of it.
    trainer = Trainer(CONFIGS["tiny"], Schedule(1e-3, 1, 0.1, 1.0), make_mesh(data=4))
    parameters = jax.tree.leaves(jax.eval_shape(lambda: trainer.init(0)).params)
    assert row.bytes_across >= sum(x.size for x in parameters) * 4 / 2
