"""`jax.distributed.initialize` in a process that may or may not belong to a job."""

import re
import types
from typing import Any

import jax
import pytest

from jaxhet import _distributed
from jaxhet._errors import UsageError

_SECRET = {"JAXHET_JOB_SECRET": "a secret of tests"}


class Calls:
    """A module like `jax.distributed`, taken over, which records what reaches JAX or jaxhet."""

    def __init__(self) -> None:
        self.jax: list[Any] = []
        self.jaxhet: list[Any] = []
        self.module: Any = types.SimpleNamespace()
        calls = self.jax

        def initialize(
            coordinator_address: str | None = None,
            num_processes: int | None = None,
            process_id: int | None = None,
            local_device_ids: Any = None,
            cluster_rank: int | None = None,
            mtls_ca_file: str | None = None,
        ) -> None:
            given = (coordinator_address, num_processes, process_id, local_device_ids)
            calls.append(given)

        self.module.initialize = initialize
        self.module.shutdown = lambda: calls.append("shutdown")
        _distributed.take_over(self.module, lambda **o: self.jaxhet.append(o), lambda: None)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def _set(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JAXHET_AUTO": "1"},  # no job
        {"JAXHET_AUTO": "0", **_SECRET},  # the user said no
        {"JAXHET_AUTO": "1", "JAXHET_NUM_PROCESSES": "2"},  # a number alone is no job
    ],
)
def test_without_a_job_jax_is_called_as_it_was(
    environ: dict[str, str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, **environ)
    calls.module.initialize("nv0:1", num_processes=2, process_id=1, local_device_ids=[0, 1])
    calls.module.shutdown()
    assert calls.jax == [("nv0:1", 2, 1, [0, 1]), "shutdown"]
    assert calls.jaxhet == []


@pytest.mark.parametrize(
    "mark",
    [
        _SECRET,
        {"JAXHET_JOB_SECRET_FILE": "secret"},
        {"JAXHET_ISLAND": "amd"},
        {"JAXHET_ISLANDS": "nvidia,amd"},
        {"JAXHET_COORDINATOR_ADDRESS": "nv0:1"},
        {"JAXHET_LAUNCHED": "1"},
    ],
)
def test_job_is_joined_with_the_arguments(
    mark: dict[str, str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **mark)
    calls.module.initialize("nv0:1", 2, process_id=1, local_device_ids=3)
    assert calls.jaxhet == [
        {
            "coordinator_address": "nv0:1",
            "num_processes": 2,
            "process_id": 1,
            "local_device_ids": (3,),
        }
    ]
    assert calls.jax == []


def test_all_arguments_of_jax_have_a_meaning(calls: Calls) -> None:
    import inspect

    known = {*_distributed._OPTIONS, *_distributed._ALWAYS_MET}
    assert {*inspect.signature(jax.distributed.initialize).parameters} <= known


def test_argument_without_a_meaning_is_refused(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **_SECRET)
    with pytest.raises(UsageError, match="cluster_rank=3, which has no meaning in a job"):
        calls.module.initialize(cluster_rank=3)


_STARTED = {
    "JAXHET_COORDINATOR_ADDRESS": "127.0.0.1:7000",
    "JAXHET_NUM_PROCESSES": "2",
    "JAXHET_PROCESS_ID": "0",
    "JAXHET_LOCAL_DEVICE_IDS": "0",
    "JAXHET_LAUNCHED": "1",
    "JAXHET_AUTO": "1",
}


@pytest.mark.parametrize(
    ("argument", "value"), [("num_processes", 3), ("process_id", 1), ("local_device_ids", (0, 1))]
)
def test_numbers_that_the_launcher_contradicts_are_refused(
    argument: str, value: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, **_STARTED)
    ours = f"JAXHET_{argument.upper()}={_STARTED[f'JAXHET_{argument.upper()}']}"
    with pytest.raises(UsageError, match=f"{argument}={re.escape(str(value))}, and .* {ours}; le"):
        calls.module.initialize(**{argument: value})
    calls.module.initialize("127.0.0.1:7000", 2, 0)
    assert len(calls.jaxhet) == 1


def test_launchers_address_and_gpus_win_with_one_line(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that numbers GPUs by process names another one in the launcher's order."""
    for process in ("0", "1"):
        _set(monkeypatch, **{**_STARTED, "JAXHET_PROCESS_ID": process})
        calls.module.initialize("nv0:1", 2, int(process), local_device_ids=int(process))
    assert calls.jaxhet[0] == {"num_processes": 2, "process_id": 0, "local_device_ids": (0,)}
    assert calls.jaxhet[1] == {"num_processes": 2, "process_id": 1}
    assert capsys.readouterr().err.splitlines() == [
        "jaxhet: the coordinator of the job is at 127.0.0.1:7000, by JAXHET_COORDINATOR_ADDRESS;"
        " nv0:1, which the program gives, is not used"
    ]


def test_certificates_of_the_user_are_not_used_and_a_warning_says_so(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **_SECRET)
    calls.module.initialize(mtls_ca_file="ca.pem")
    assert calls.jaxhet == [{}]
    assert "mtls_ca_file: a job of jaxhet makes certificates of its own" in capsys.readouterr().err


def test_functions_are_replaced_once(calls: Calls) -> None:
    replaced = calls.module.initialize
    _distributed.take_over(calls.module, lambda: None, lambda: None)
    assert calls.module.initialize is replaced
    assert replaced.__name__ == "initialize"
