"""A real Open MPI starts a training over two islands, which agrees with one world."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from jaxhet.testing import free_port
from tests.support import training
from tests.support.jobs import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian: openmpi-bin)"),
    pytest.mark.skipif(
        "Open MPI" not in subprocess.getoutput("mpirun --version"),
        reason="mpirun is of another MPI than Open MPI",
    ),
]

# Like `mpirun --allow-run-as-root --oversubscribe`, also for scripts that call mpirun. All of its
# own connections, and what it says about its address, stay on this machine.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl": "self",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def _run(command: list[str], **env: str) -> str:
    """Runs a command that starts mpirun; returns what all processes print."""
    ended = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env={**training.clean_environment(), **_MPI, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _contexts(*command: str) -> list[str]:
    """A command that starts another one in two contexts of a process each."""
    one = ["-np", "1", *command]
    return ["mpirun", *one, ":", *one]


def test_contexts_are_islands_that_train_as_one_world(tmp_path: pathlib.Path) -> None:
    secret = str(training.make_secret(tmp_path))
    _run(_contexts(*training.command(tmp_path / "run", 2)), JAXHET_JOB_SECRET_FILE=secret)
    largest = training.assert_agrees(tmp_path / "run", training.world(), 2)
    print(f"losses differ by {largest:.2g} at most")


def test_unmodified_program_runs_under_mpirun(tmp_path: pathlib.Path) -> None:
    program = pathlib.Path(__file__).parent / "unmodified_program.py"
    run = (sys.executable, "-m", "jaxhet.cli", "run", "--", sys.executable, str(program))
    secret = str(training.make_secret(tmp_path))
    text = _run(_contexts(*run), JAXHET_JOB_SECRET_FILE=secret)
    assert text.count('"gathered": [0, 1]') == 2, text


def test_script_of_deploy_starts_a_training_that_agrees_with_one_world(
    tmp_path: pathlib.Path,
) -> None:
    secret = str(training.make_secret(tmp_path))
    job = ["sh", "deploy/mpi/job.sh", "127.0.0.1", "127.0.0.1"]
    _run(
        [*job, *training.command(tmp_path / "run", 2)],
        JAXHET_JOB_SECRET_FILE=secret,
        JAXHET_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}",
    )
    training.assert_agrees(tmp_path / "run", training.world(), 2)
