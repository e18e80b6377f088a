"""A short training of `tiny` that other launchers start, and its comparison with one world."""

import functools
import os
import pathlib
import sys
import tempfile

from benchmarks.demo import FIRST_STEPS, FIRST_STEPS_TOLERANCE
from jaxhet.testing import FAST_COMPILE
from models.extras.records import METRICS, compare_replicas, differences, read_rows
from tests.support.commands import python
from tests.support.jobs import PYTHONPATH
from tests.support.scripts import environment

# Prefixes of variables that a scheduler sets.
_SCHEDULERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")


def command(folder: pathlib.Path, processes: int) -> list[str]:
    """The command of one process, which has one device; the metrics are written to the folder."""
    return [
        *(sys.executable, "-m", "models.pretrain", "--config=tiny", "--batch=8", "--seq=32"),
        *(f"--steps={FIRST_STEPS}", "--log-every=5", "--digest", f"--mesh=data={processes}"),
        f"--run-dir={folder}",
    ]


def clean_environment() -> dict[str, str]:
    """This process's environment without jaxhet's options and without those of schedulers."""
    kept = {k: v for k, v in environment().items() if not k.startswith(_SCHEDULERS)}
    return {**kept, **FAST_COMPILE, "PYTHONPATH": PYTHONPATH}


def make_secret(folder: pathlib.Path) -> pathlib.Path:
    """A file with a job secret that only this user can read."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex())
    return secret


def losses(folder: pathlib.Path) -> list[float]:
    """The losses of all steps."""
    rows = read_rows(folder / METRICS)
    assert [row["step"] for row in rows] == list(range(1, FIRST_STEPS + 1))
    return [row["loss"] for row in rows]


def train_in_one_world(folder: pathlib.Path, devices: int) -> list[float]:
    """The losses of the same training in one process of plain JAX."""
    python(*command(folder, devices)[1:], env={"JAX_NUM_CPU_DEVICES": str(devices)})
    return losses(folder)


@functools.cache
def world() -> list[float]:
    """The losses of the training in one world of two devices."""
    with tempfile.TemporaryDirectory() as folder:
        return train_in_one_world(pathlib.Path(folder), 2)


def assert_agrees(folder: pathlib.Path, world: list[float], devices: int) -> float:
    """Checks the losses and the replicas of a run over two islands.

    Args:
      folder: Folder of the run.
      world: Losses of the same training in one world.
      devices: Devices of the run.

    Returns:
      The largest relative difference of a loss.
    """
    rows = read_rows(folder / METRICS)
    assert rows[-1]["exchanges_completed"] > 0, "nothing was exchanged between islands"
    replicas = compare_replicas(folder)
    assert replicas.complete(devices, devices)
    assert replicas.equal, replicas.differences
    largest = max(differences(losses(folder), world))
    assert largest <= FIRST_STEPS_TOLERANCE
    return largest
