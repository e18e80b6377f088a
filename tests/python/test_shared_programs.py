"""Executables travel from the first process of a tuning class to those that ask for them."""

import base64
import functools
import pathlib
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxhet._gpu import gpu_settings, shared_programs, tuning
from jaxhet._gpu.shared_programs import NotSharedError, SharedPrograms
from jaxhet._job import membership
from jaxhet._job.coordinator import Coordinator
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.terms import Terms

_MEMBERS = (2, 3, 5)


class _Class:
    """The processes of a tuning class; messages are heard at once."""

    def __init__(self, timeout_s: float = 20):
        self.messages: list[dict[str, Any]] = []
        self.of = {
            p: SharedPrograms(_MEMBERS, p, self._tell, str.upper, timeout_s) for p in _MEMBERS
        }

    def _tell(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        for process in message["to"]:
            self.of[process].hear(message)

    def fetch(
        self, process: int, key: str = "key", is_over: Callable[[], bool] = lambda: False
    ) -> bytes:
        return self.of[process].fetch(_MEMBERS, key, is_over)[1]

    def parts(self) -> int:
        return sum("part" in message for message in self.messages)


class _Fetching(threading.Thread):
    """A process that asks for a program from now on."""

    def __init__(self, processes: _Class, process: int, key: str = "key"):
        super().__init__(daemon=True)
        self._fetch = functools.partial(processes.fetch, process, key)
        self._answer: bytes | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._fetch()
        except NotSharedError as error:
            self._answer = error

    def answer(self) -> bytes:
        self.join(20)
        assert self._answer is not None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_others_wait_for_the_executable_of_the_first() -> None:
    processes = _Class()
    waiting = [_Fetching(processes, process) for process in (3, 5)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in waiting)
    processes.of[2].add(_MEMBERS, "key", b"compiled", "")
    assert [thread.answer() for thread in waiting] == [b"compiled", b"compiled"]
    assert processes.fetch(3) == b"compiled"  # again, and after the first has compiled


def test_text_about_the_program_goes_with_its_executable() -> None:
    processes = _Class()
    processes.of[2].add(_MEMBERS, "key", b"compiled", "größer")
    assert processes.of[3].fetch(_MEMBERS, "key", lambda: False) == ("GRÖSSER", b"compiled")


def test_nobody_gets_what_it_does_not_ask_for() -> None:
    processes = _Class()
    processes.of[2].add(_MEMBERS, "key", b"compiled", "")
    time.sleep(0.2)
    assert processes.messages == []
    processes.of[3].hear({"key": "key", "part": 0, "of": 1, "bytes": "AAAA"})
    assert processes.fetch(3) == b"compiled"


def test_large_executables_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_PART_BYTES", 100)
    processes = _Class()
    executable = random.Random(0).randbytes(1050)
    processes.of[2].add(_MEMBERS, "key", executable, "")
    assert processes.fetch(5) == executable
    assert processes.parts() == 11


@pytest.mark.parametrize(
    "change",
    [
        {"of": 0},
        {"of": None},
        {"part": 1},
        {"bytes": ""},
        {"bytes": "A"},
        {"bytes": base64.b64encode(b"?" * 40).decode()},
    ],
)
def test_damaged_executable_is_refused_at_once(change: dict[str, Any]) -> None:
    processes = _Class()

    def tell(message: dict[str, Any]) -> None:
        processes.of[3].hear(message | change if "part" in message else message)

    processes.of[2]._tell = tell
    processes.of[2].add(_MEMBERS, "key", b"compiled", "")
    with pytest.raises(NotSharedError, match="the executable arrived damaged"):
        processes.fetch(3)


def test_only_the_latest_executables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_MOST_KEPT_BYTES", 250)
    processes = _Class()
    for i in range(3):
        processes.of[2].add(_MEMBERS, f"key{i}", random.Random(i).randbytes(100), "")
    assert processes.fetch(3, "key2") == random.Random(2).randbytes(100)
    assert processes.fetch(3, "key1") == random.Random(1).randbytes(100)
    with pytest.raises(NotSharedError, match="it is not kept any more"):
        processes.fetch(3, "key0")


def test_process_that_is_ahead_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_GRACE_S", 1.0)
    processes = _Class()
    processes.of[2].add(_MEMBERS, "first", b"1", "")
    assert processes.fetch(3, "first") == b"1"
    processes.of[3].add(_MEMBERS, "first", None, "")
    waiting = _Fetching(processes, 3, "second")
    time.sleep(2.5)
    assert waiting.is_alive()  # for the second program
    processes.of[2].add(_MEMBERS, "second", b"2", "")
    assert waiting.answer() == b"2"
    assert processes.fetch(3, "first") == b"1"


def test_process_with_another_program_is_told_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_programs, "_GRACE_S", 1.0)
    processes = _Class()
    waiting = _Fetching(processes, 3, "mine")
    processes.of[2].add(_MEMBERS, "yours", b"1", "")
    processes.of[2].add((2, 5), "of others", b"1", "")
    time.sleep(0.5)
    assert waiting.is_alive()
    with pytest.raises(NotSharedError, match="it has compiled another one in its place"):
        waiting.answer()


def test_threads_may_compile_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_GRACE_S", 0.5)
    processes = _Class()
    waiting = _Fetching(processes, 3, "b")
    processes.of[2].begin("b")
    processes.of[2].add(_MEMBERS, "a", b"1", "")
    time.sleep(2)
    processes.of[2].add(_MEMBERS, "b", b"2", "")
    assert waiting.answer() == b"2"
    assert processes.fetch(3, "a") == b"1"


def test_process_that_could_not_compile_says_why() -> None:
    processes = _Class()
    waiting = _Fetching(processes, 3)
    processes.of[2].add_failure(_MEMBERS, "key", "XlaRuntimeError: out of memory")
    for ask in (waiting.answer, lambda: processes.fetch(5)):
        with pytest.raises(NotSharedError, match="XlaRuntimeError: out of memory"):
            ask()
    processes.of[2].add(_MEMBERS, "key", b"at the second attempt", "")
    time.sleep(0.3)
    assert processes.fetch(3) == b"at the second attempt"


def test_threads_may_want_the_same_program() -> None:
    processes = _Class()
    waiting = [_Fetching(processes, 3) for _ in range(3)]
    processes.of[2].add(_MEMBERS, "key", b"compiled", "")
    assert [thread.answer() for thread in waiting] == [b"compiled"] * 3
    assert not processes.of[3]._waiting
    assert not processes.of[3]._answers
    assert not processes.of[3]._parts


def test_wait_ends_at_the_deadline() -> None:
    processes = _Class(timeout_s=0.3)
    with pytest.raises(NotSharedError, match=r"not come within 0.3 s \(JAXHET_TUNING_TIMEOUT_S\)"):
        processes.fetch(3)


def test_wait_ends_when_the_job_fails() -> None:
    with pytest.raises(NotSharedError, match="the job is over"):
        _Class().fetch(3, is_over=lambda: True)


def test_program_is_shared_by_those_of_the_class_that_run_it() -> None:
    of = _Class().of
    assert [of[p].among({0, 1, 2, 3, 4, 5}) for p in _MEMBERS] == [_MEMBERS] * 3
    assert of[5].among({3, 5}) == (3, 5)
    assert of[3].among({3}) == ()
    assert of[3].among({3, 4}) == ()  # another class
    assert of[3].among({2, 5}) == ()  # a program of others


# --- settings ---


def test_folder_is_beside_the_compilation_cache(tmp_path: pathlib.Path) -> None:
    folder = tuning.folder(3, str(tmp_path))
    assert folder == tmp_path / "jaxhet_autotune" / "process3"
    assert (tmp_path / "jaxhet_autotune" / "process3").is_dir()
    assert tuning.folder(3, None) is None
    assert tuning.folder(3, "gs://bucket") is None


@pytest.mark.parametrize(
    ("flags", "is_users"),
    [
        ({}, False),
        ({"xla_gpu_autotune_level": "4"}, False),
        ({"xla_gpu_autotune_level": "0"}, True),
        ({"xla_gpu_load_autotune_results_from": "x"}, True),
        ({"xla_gpu_per_fusion_autotune_cache_dir": "x"}, True),
    ],
)
def test_flags_of_the_user_win(flags: dict[str, str], is_users: bool) -> None:
    assert tuning.is_users(flags) is is_users


def test_tuning_is_on_and_the_log_says_what_was_added(tmp_path: pathlib.Path) -> None:
    completed = gpu_settings.complete("--a=1", {tuning.FOLDER_FLAG: str(tmp_path)})
    assert "xla_gpu_autotune_level" not in completed
    line = gpu_settings.added("--a=1", completed)
    assert line.startswith("added to XLA_FLAGS: --xla_gpu_shard_autotuning=false")
    assert f"--xla_gpu_per_fusion_autotune_cache_dir={tmp_path}" in line


# --- through a coordinator ---


def test_coordinator_passes_messages_on_also_before_there_is_a_listener(
    make_process_info: Callable[[int], ProcessInfo],
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    coordinator = Coordinator(listener, b"secret", Terms(2, 20))
    threading.Thread(target=coordinator.serve, daemon=True).start()
    members = [membership.connect(address, b"secret", 20) for _ in range(2)]
    joins = [
        threading.Thread(target=member.join, args=(make_process_info(process), 20))
        for process, member in enumerate(members)
    ]
    for thread in joins:
        thread.start()
    for thread in joins:
        thread.join()
    large = {"f": "x" * (3 << 20)}
    sent = [{"to": [1], "program": str(i), "files": large if i == 1 else {}} for i in range(4)]
    for message in sent[:2]:
        members[0].tell_of_program(message)
    time.sleep(0.3)
    heard: list[dict[str, Any]] = []
    done = threading.Event()

    def hear(message: dict[str, Any]) -> None:
        heard.append(message)
        if len(heard) == len(sent):
            done.set()

    members[1].listen_programs(hear)
    for message in sent[2:]:
        members[0].tell_of_program(message)
    assert done.wait(20)
    assert heard == sent
    for member in members:
        member.leave()
    coordinator.stop()


@pytest.fixture
def make_process_info() -> Callable[[int], ProcessInfo]:
    def make(process: int) -> ProcessInfo:
        return ProcessInfo(
            process=process,
            num_processes=2,
            island=f"i{process}",
            is_declared=True,
            islands=(),
            platform="cuda",
            topology=("cuda", "cuda"),
            has_cpu=True,
            host="h",
            host_id="h",
            pid=process,
            address="h:1",
            versions={},
            options={},
            settings={},
        )

    return make
