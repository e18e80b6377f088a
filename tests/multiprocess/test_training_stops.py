"""Training over two islands whose processes differ stops before its first step."""

import pathlib
import re
import shlex
import sys
import time

from tests.support.commands import launch, python

TRAIN = ("models.pretrain", "--config=tiny", "--batch=4", "--seq=16", "--mesh=data=2", "--warmup=1")


def _train_differently(*options: str) -> str:
    """Output of a training that must fail before its first step; $ID is the process."""
    words = (sys.executable, "-m", *TRAIN, "--steps=3", "--log-every=1", *options)
    program = " ".join(shlex.quote(word).replace("$ID", "'$JAXHET_PROCESS_ID'") for word in words)
    begin = time.monotonic()
    *job, _ = launch("--islands=2", "--devices=1")
    ended = python(*job, "sh", "-c", f"exec {program}", exit_code=1)
    output = ended.stdout + ended.stderr
    assert time.monotonic() - begin < 120
    assert "step 1/" not in output
    assert "Traceback" not in output
    return output


def test_other_seed_and_data_of_an_island_are_named_before_the_first_step(
    tmp_path: pathlib.Path,
) -> None:
    for process in range(2):
        (tmp_path / f"text{process}").write_text(f"{process} and much more text " * 20)
    output = _train_differently(
        "--seed=$ID", f"--data={tmp_path}/text$ID", f"--run-dir={tmp_path}/run"
    )
    words = (
        r"the processes of the job differ in --seed \(0 in process 0, 1 in process 1\);"
        r" the data \(\d+ tokens, digest \w+ in process 0, \d+ tokens, digest \w+ in process 1\)\. "
    )
    for process in range(2):
        assert re.search(rf"^\[island{process}/{process}\] .*: {words}", output, re.MULTILINE)


def test_run_folder_of_each_island_is_told_before_the_first_step(tmp_path: pathlib.Path) -> None:
    for process in range(2):  # equal data may have another path on each island
        (tmp_path / f"text{process}").write_text("much text " * 50)
    output = _train_differently(f"--data={tmp_path}/text$ID", f"--run-dir={tmp_path}/run$ID")
    for process in range(2):
        words = rf"\[island{process}/{process}\] .*: process 1 can't see the file that process 0 .*"
        assert re.search(words + f"--run-dir {tmp_path}/run{process} ", output), output
    assert not [*tmp_path.glob("run*/.*")]
