"""A real Slurm runs a heterogeneous job of two components, which trains as one world does."""

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from jaxhet.testing import free_port
from tests.support import slurm, training
from tests.support.jobs import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.unavailable()), reason=slurm.unavailable() or "available"),
]

_DIRECTIVES = """\
#!/bin/bash
#SBATCH --partition=nvidia --nodes=1 --ntasks-per-node=1
#SBATCH hetjob
#SBATCH --partition=amd --nodes=1 --ntasks-per-node=1
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), training.clean_environment()) as running:
        yield running


def _submit(cluster: slurm.Slurm, script: pathlib.Path, *command: str, **env: str) -> str:
    """Runs a batch script to its end; returns the output of the job."""
    output = script.with_suffix(".txt")
    values = [f"{name}={value}" for name, value in env.items()]
    values.append(f"JAXHET_COORDINATOR_ADDRESS=127.0.0.1:{free_port()}")  # nv0 is no host's name
    sbatch = ["sbatch", "--wait", f"--output={output}", str(script), *command]
    ended = cluster.run("env", *values, *sbatch, timeout_s=200)
    text = output.read_text() if output.exists() else ""
    assert ended.returncode == 0, f"{ended.stderr}\n{text}\n{cluster.logs()}"
    return text


def test_one_step_over_both_components_trains_as_one_world(
    cluster: slurm.Slurm, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f'{_DIRECTIVES}cd "{ROOT}"\nsrun --het-group=0,1 "$@"\n')
    _submit(
        cluster,
        script,
        *training.command(tmp_path / "run", 2),
        JAXHET_JOB_SECRET_FILE=str(training.make_secret(tmp_path)),
    )
    largest = training.assert_agrees(tmp_path / "run", training.world(), 2)
    print(f"losses differ by {largest:.2g} at most")


def test_detected_islands_of_steps_apart_are_the_components(
    cluster: slurm.Slurm, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "job.sh"
    steps = 'srun --het-group=0 "$@"\nsrun --het-group=1 "$@"\n'
    script.write_text(_DIRECTIVES + steps)
    show = (
        "from jaxhet import _clusters; config = _clusters.resolve();"
        " print('Slurm', config.process_id, config.num_processes, config.island,"
        " *config.islands)"
    )
    text = _submit(cluster, script, training.command(tmp_path, 2)[0], "-c", show)
    places = re.findall(r"^Slurm .*$", text, re.MULTILINE)
    assert sorted(places) == [
        f"Slurm {i} 2 component{i} component0=1 component1=1" for i in range(2)
    ], text


def test_script_of_deploy_trains_as_one_world(cluster: slurm.Slurm, tmp_path: pathlib.Path) -> None:
    here = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", here)
    script = here / "slurm" / "job.sh"
    changed, number = re.subn(
        r"--nodes=2 (.*) --gpus-per-node=8 --exclusive", r"--nodes=1 \1", script.read_text()
    )
    assert number == 2
    script.write_text(changed)
    command = training.command(tmp_path / "run", 2)
    text = _submit(cluster, script, *command, JAXHET_HERE=str(here))
    training.assert_agrees(tmp_path / "run", training.world(), 2)
    assert re.search(r"^0: ", text, re.MULTILINE)  # srun --label
    assert not list(here.glob(".secret*"))


def test_failure_of_one_component_ends_the_job_of_the_script(
    cluster: slurm.Slurm, tmp_path: pathlib.Path
) -> None:
    here = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", here)
    script = here / "slurm" / "job.sh"
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#SBATCH")]
    script.write_text(_DIRECTIVES + "\n".join(lines[1:]) + "\n")
    program = (
        "import jax, jaxhet, os, time\n"
        "jaxhet.initialize()\n"
        "if jax.process_index(): os._exit(3)\n"
        "time.sleep(60)\n"
    )
    python = training.command(tmp_path, 2)[0]
    with pytest.raises(AssertionError, match=r"0: jaxhet: this process did not end within .* s"):
        _submit(
            cluster,
            script,
            *(python, "-c", program),
            JAXHET_HERE=str(here),
            JAXHET_EXIT_TIMEOUT_S="20",
        )
