"""The benchmarks for GPUs, tried out on CPU: what they run, check and write; not how fast it is."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import pytest

from benchmarks import collective_cases, gpu_parity
from benchmarks.collectives import COLLECTIVES, Case, busbw_factor, timing
from benchmarks.training import Built
from models.extras.records import Replicas
from tests.support.commands import python

ON_CPU = ("--platform=cpu", "--systems=host,nccl")


def run(name: str, folder: pathlib.Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark; returns what it wrote. A bar that is missed on CPU says nothing."""
    path = folder / "figures.json"
    command = ("-m", f"benchmarks.{name}", *ON_CPU, f"--json={path}", *options)
    result = python(*command, exit_code=None)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    assert path.exists(), result.stdout + result.stderr
    assert "bars reached" in result.stdout or "MISSED" in result.stdout, result.stdout
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_collectives_are_timed_alone_and_in_chains(tmp_path: pathlib.Path) -> None:
    written = run("gpu_collectives", tmp_path, "--sizes=1K,16M", "--repeats=1", "--copy-bytes=1M")
    rows = {(r["system"], r["collective"], r["bytes"]): r for r in written["rows"]}
    systems, sizes = ("host", "nccl"), (1 << 10, 16 << 20)
    missing = set(itertools.product(systems, COLLECTIVES, sizes)) - rows.keys()
    # JAX's own Gloo gets a long chain of these wrong now and then, and is left out.
    assert missing <= {("nccl", "reduce_scatter", 16 << 20)}
    assert all(row["p50_us"] > 0 for row in rows.values())
    assert rows["host", "permute", 1 << 10]["links"] == 0
    assert rows["host", "permute", 16 << 20]["links"] > 1
    assert rows["host", "permute", 16 << 20]["ratio"] > 0  # the unit is the rate of copies
    assert min(written["copies_gb_s"].values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["tiny", "plain-tiny"])
def test_training_is_timed_and_taken_apart(program: str, tmp_path: pathlib.Path) -> None:
    size = (f"--programs={program}", "--layers=1", "--seq=8", "--steps=1", "--repeats=1")
    written = run("gpu_train", tmp_path, *size, "--meshes", "data=-1", "--forms=scan")
    rows = {row["system"]: row for row in written["rows"]}
    assert rows["host"]["built"]["flops"] > 0
    assert rows["host"]["loss"] == pytest.approx(rows["nccl"]["loss"], rel=1e-2)
    assert rows["host"]["built"]["exchanges"] > 0
    assert rows["nccl"]["built"]["exchanges"] == 0
    assert rows["host"]["alone_s"] > 0
    assert rows["host"]["exchange_s"] > 0
    built = Built(**rows["host"]["built"])
    parts = built.pre_s, built.between_s, built.post_s, built.after_s
    assert min(parts) > 0
    assert sum(parts) < built.compile_s


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["tiny", "plain-tiny"])
def test_losses_and_replicas_are_compared(program: str, tmp_path: pathlib.Path) -> None:
    size = (f"--config={program}", "--layers=1", "--seq=16", "--steps=3", "--log-every=2")
    where = f"--run-dir={tmp_path}"
    written = run("gpu_parity", tmp_path, *size, where, "--dtypes=float32")
    rows = {row["system"]: row for row in written["rows"]}
    assert rows.keys() == {"host", gpu_parity.BASELINE, gpu_parity.FLOOR}
    assert rows["host"]["difference"] < 1e-5
    assert (written["text"], len(written["sha256"])) == ("standard-library", 64)
    assert 0 < written["passes"] < 1
    for row in rows.values():
        assert row["is_complete"]
        assert row["replicas"]["steps"] == 3  # 0, 2 and 3
        assert not row["replicas"]["differences"]


def test_busbw_is_that_of_nccl_tests() -> None:
    assert [busbw_factor(c, 4) for c in COLLECTIVES] == [1.5, 0.75, 0.75, 0.75, 1.0]
    seen = timing("all_reduce", 1000, 4, [1e-6])
    assert (seen.p50_us, seen.algbw_gb_s, seen.busbw_gb_s) == pytest.approx((1.0, 1.0, 1.5))


def parity_row(difference: float, replicas: Replicas, is_complete: bool = True) -> gpu_parity.Row:
    return gpu_parity.Row(
        "bfloat16", "host", 3, 2.0, 1.0, difference, 0, None, replicas, is_complete, ()
    )


def test_parity_needs_near_losses_and_equal_replicas() -> None:
    equal = Replicas(steps=3, devices=2, compared=9, fewest=2, differences=())
    differ = Replicas(steps=3, devices=2, compared=9, fewest=2, differences=("step 1",))
    assert not parity_row(9e-4, equal).is_missed
    assert parity_row(1e-3, equal).is_missed
    assert parity_row(float("nan"), equal).is_missed
    assert parity_row(0.0, differ).is_missed
    assert parity_row(0.0, equal, is_complete=False).is_missed


def test_deterministic_kernels_need_equal_losses_and_parameters() -> None:
    equal = Replicas(steps=3, devices=2, compared=9, fewest=2, differences=())
    row = dataclasses.replace(
        parity_row(1e-7, equal), needs_equal_bits=True, equal_steps=2, same_bits=(9, 9)
    )
    assert row.is_missed
    assert "2 MISSED" in gpu_parity.table([row])
    same = dataclasses.replace(row, equal_steps=3, difference=0.0)
    assert not same.is_missed
    for same_bits in (None, (0, 0), (8, 9)):
        assert dataclasses.replace(same, same_bits=same_bits).is_missed
    assert not dataclasses.replace(row, system=gpu_parity.FLOOR).is_missed


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_a_wrong_element_is_counted(
    collective: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(collective, 400, 0, dtype)
    assert collective_cases.prepare(case).num_wrong == 0
    right = collective_cases._collective(case)

    def spoilt(x: jax.Array) -> jax.Array:
        return right(x).at[5].add(1).at[7].add(3)

    monkeypatch.setattr(collective_cases, "_collective", lambda case: spoilt)
    assert collective_cases.prepare(case).num_wrong == 2 * jax.device_count()
