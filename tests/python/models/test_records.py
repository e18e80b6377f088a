import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.extras.records import (
    Journal,
    compare_replicas,
    digest_rows,
    read_rows,
    same_bits,
)


def test_journal_of_a_resumed_run_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = Journal(path, start=0)
    first.append([{"step": step, "loss": 1.0} for step in (1, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    Journal(path, start=2).append([{"step": 3, "loss": 2.0}])
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize("changed", [False, True])
def test_replicas_are_compared_bit_by_bit(changed, tmp_path, make_mesh):
    mesh = make_mesh(data=2, model=2)
    params = {
        "split": jax.device_put(
            np.arange(6.0).reshape(3, 2), NamedSharding(mesh, jax.P(None, "model"))
        ),
        "whole": jax.device_put(np.zeros(()), NamedSharding(mesh, PartitionSpec())),
    }
    rows = digest_rows(5, params)
    assert len(rows) == 4
    if changed:
        piece = np.array(0.0) * -1.0  # equal as a number, not in its bits
        other = digest_rows(5, {"whole": jax.device_put(np.float32(piece))})
        rows[3]["digests"]["whole"] = other[0]["digests"]["whole"]
    (tmp_path / "digests-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = compare_replicas(tmp_path)
    assert (seen.steps, seen.devices, seen.compared, seen.fewest) == (1, 4, 3, 2)
    assert seen.complete(devices=4, copies=2)
    assert not seen.complete(devices=4, copies=3)
    assert seen.equal != changed
    if changed:
        assert seen.differences == ("step 5, whole[]: devices 0, 1, 2, 3 differ",)


def test_parameters_of_two_runs_are_compared_bit_by_bit(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    zero = jax.device_put(np.zeros(2, np.float32))
    for folder, first in ((one, zero), (other, -zero)):
        folder.mkdir()
        rows = digest_rows(0, {"a": first, "b": zero}) + digest_rows(9, {"b": zero})
        (folder / "digests-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert same_bits(one, other) == (2, 3)
    assert same_bits(one, one) == (3, 3)
    assert same_bits(one, tmp_path / "none") == (0, 0)
