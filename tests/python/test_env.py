"""`jaxhet env`: values, their sources, and missing ones."""

import json
import subprocess
import sys

import pytest

from jaxhet._errors import UsageError
from jaxhet.cli import env
from tests.support import schemas
from tests.support.scripts import environment

_SLURM = {
    "SLURM_JOB_ID": "5123",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
_SECRET = {"JAXHET_JOB_SECRET": "a secret of tests"}


def _print(*flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxhet.cli", "env", *flags],
        check=False,
        capture_output=True,
        text=True,
        env={**environment(), **extra},
        timeout=60,
    )


def test_values_have_their_sources() -> None:
    found = env.look({**_SLURM, **_SECRET, "JAXHET_ISLAND": "amd"})
    assert found.scheduler == "Slurm"
    assert found.values["coordinator_address"] == (
        "gpu007:62467",
        "SLURM_STEP_NODELIST, SLURM_JOB_ID",
    )
    assert found.values["process_id"] == (1, "SLURM_PROCID")
    assert found.values["island"] == ("amd", "JAXHET_ISLAND")
    assert found.values["job_secret"] == ("set", "JAXHET_JOB_SECRET")
    assert found.is_complete


def test_process_id_that_the_coordinator_gives_says_so() -> None:
    given = {"COORDINATOR_ADDRESS": "nv0:1", "ISLAND": "amd", "ISLAND_PROCESS_ID": "1"}
    found = env.look({**_SECRET, **{f"JAXHET_{name}": value for name, value in given.items()}})
    assert found.values["process_id"] == ("", "the coordinator")
    assert found.is_complete


def test_missing_values_say_how_to_give_them() -> None:
    found = env.look({"SLURM_JOB_ID": "5123"})
    assert list(found.missing) == ["coordinator_address", "process_id", "job_secret"]
    assert "set JAXHET_COORDINATOR_ADDRESS" in found.missing["coordinator_address"]
    assert "JAXHET_JOB_SECRET_FILE to a file that all processes" in found.missing["job_secret"]
    assert found.hints[0].endswith("start the program with srun")
    assert not found.is_complete


def test_problem_is_that_of_initialize() -> None:
    found = env.look({**_SLURM, **_SECRET, "JAXHET_PROCESS_ID": "2"})
    assert found.problem.startswith("process_id=2 is not one of the job's 2 processes")
    assert not found.is_complete


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAXHET_JOB_SECRET": "x"}, "the job secret has 1 bytes"),
        ({"JAXHET_JOB_SECRET_FILE": "/nope"}, "can't read JAXHET_JOB_SECRET_FILE /nope"),
        ({"JAXHET_JOB_SECRET_FILE": "/dev/null"}, "JAXHET_JOB_SECRET_FILE /dev/null is a device"),
        ({**_SECRET, "JAXHET_COORDINATOR_ADDRESS": "foo"}, "coordinator_address 'foo' is not host"),
    ],
)
def test_secret_and_address_are_those_that_initialize_takes(
    environ: dict[str, str], words: str
) -> None:
    given = {"COORDINATOR_ADDRESS": "nv0:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    found = env.look({**{f"JAXHET_{name}": value for name, value in given.items()}, **environ})
    assert found.problem.startswith(words)
    assert not found.is_complete


def test_wrong_value_is_an_error() -> None:
    with pytest.raises(UsageError, match="JAXHET_PROCESS_ID='one' is not a whole number"):
        env.look({"JAXHET_PROCESS_ID": "one"})


def test_command_prints_a_table_without_the_secret() -> None:
    ended = _print(**_SLURM, **_SECRET)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("started by Slurm\n")
    assert "gpu007:62467" in ended.stdout
    assert "a secret of tests" not in ended.stdout


def test_command_prints_an_address_of_ipv6() -> None:
    ended = _print(**_SECRET, JAXHET_COORDINATOR_ADDRESS="[fd00::1]:7000", JAXHET_ISLAND="[x]")
    assert "[fd00::1]:7000" in ended.stdout
    assert "[x]" in ended.stdout


def test_command_prints_json_and_fails_where_something_is_missing() -> None:
    ended = _print("--json", JAXHET_ISLAND="amd")
    assert ended.returncode == 1
    schemas.check("env", ended.stdout)
    assert json.loads(ended.stdout)["values"]["island"] == ["amd", "JAXHET_ISLAND"]
    assert "process_id" in json.loads(ended.stdout)["missing"]
