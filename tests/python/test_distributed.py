"""`jax.distributed.initialize` in a process that may or may not belong to a job."""

import types
from typing import Any

import jax
import pytest

from jaxhet import _distributed, _initialize
from jaxhet._errors import UsageError

_SECRET = {"JAXHET_JOB_SECRET": "a secret of tests"}


class Calls:
    """A module like `jax.distributed`, taken over, which records what reaches JAX or jaxhet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
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
        _distributed.take_over(self.module)
        monkeypatch.setattr(_initialize, "initialize", lambda **o: self.jaxhet.append(o))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


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

    known = {*_distributed._OPTIONS, *_distributed._SETTINGS, *_distributed._ALWAYS_MET}
    assert {*inspect.signature(jax.distributed.initialize).parameters} <= known


def test_argument_without_a_meaning_is_refused(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **_SECRET)
    with pytest.raises(UsageError, match="cluster_rank=3, which has no meaning in a job"):
        calls.module.initialize(cluster_rank=3)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("coordinator_address", "nv0:1"), ("num_processes", 3), ("process_id", 0)],
)
def test_arguments_that_the_launcher_contradicts_are_refused(
    argument: str, value: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"COORDINATOR_ADDRESS": "127.0.0.1:7000", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    _set(monkeypatch, **{f"JAXHET_{name}": text for name, text in started.items()})
    _set(monkeypatch, JAXHET_AUTO="1", JAXHET_LAUNCHED="1")
    words = f"JAXHET_{argument.upper()}={started[argument.upper()]}; leave the argument out"
    with pytest.raises(UsageError, match=words):
        calls.module.initialize(**{argument: value})
    calls.module.initialize("127.0.0.1:7000", 2, 1)
    assert len(calls.jaxhet) == 1


def test_certificates_are_given_to_jax(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **_SECRET)
    before = jax.config.jax_mtls_ca_file
    try:
        calls.module.initialize(mtls_ca_file="ca.pem")
        assert jax.config.jax_mtls_ca_file == "ca.pem"
    finally:
        jax.config.update("jax_mtls_ca_file", before)


@pytest.mark.parametrize(
    ("joined", "environ", "words"),
    [
        (
            False,
            {"JAXHET_LAUNCHED": "1", "JAXHET_PROCESS_ID": "1"},
            "process 1 computed outside of",
        ),
        (False, {"JAXHET_COORDINATOR_ADDRESS": "nv0:1"}, "this process computed outside of"),
        (False, {"JAXHET_LAUNCHED": "1", "JAXHET_PROCESS_ID": "x"}, ""),  # it could not join
        (True, {"JAXHET_LAUNCHED": "1"}, ""),
    ],
)
def test_program_that_computes_outside_of_the_job_says_so(
    joined: bool,
    environ: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _set(monkeypatch, JAXHET_AUTO="1", **environ)
    monkeypatch.setattr(_initialize, "has_joined", lambda: joined)
    jax.devices()
    _distributed._report_unjoined()
    assert capsys.readouterr().err.startswith(f"jaxhet: {words}" if words else "")
    _set(monkeypatch, JAXHET_AUTO="0")
    _distributed._report_unjoined()
    assert capsys.readouterr().err == ""


def test_functions_are_replaced_once(calls: Calls) -> None:
    replaced = calls.module.initialize
    _distributed.take_over(calls.module)
    assert calls.module.initialize is replaced
    assert replaced.__name__ == "initialize"
