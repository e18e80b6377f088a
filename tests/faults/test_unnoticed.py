"""A process whose program does not notice that another one has died, while it saves and after."""

import pathlib

import pytest

from tests.support.scripts import ON_GPUS_TOO, job, on, run

# Process 1 dies; process 0 writes a file for longer than it may live without progress, and ends.
_SCRIPT = """
import os, pathlib, signal, time
import jaxhet
jaxhet.initialize()
folder = pathlib.Path(os.environ["FOLDER"])
if os.environ["JAXHET_PROCESS_ID"] == "1":
    while not (folder / "part").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
with jaxhet.saving(folder), (folder / "part").open("wb", buffering=0) as file:
    for _ in range(35):
        file.write(bytes(1000))
        time.sleep(0.1)
print("saved", flush=True)
"""


@pytest.mark.slow
@ON_GPUS_TOO
def test_unnoticed_failure_lets_a_save_end_and_changes_the_exit_code(
    platform: str, tmp_path: pathlib.Path
) -> None:
    envs = job(FOLDER=str(tmp_path), JAXHET_EXIT_TIMEOUT_S="5")
    survivor = run(_SCRIPT, *on(platform, envs))[0]
    assert "saved" in survivor.text, survivor.text
    assert (tmp_path / "part").stat().st_size == 35_000
    assert survivor.code == 70, survivor.text
    assert "leaves its job as if that had not failed: " in survivor.text
    assert "process 1 (island1, " in survivor.text
