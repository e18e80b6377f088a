"""Tuned kernels travel from the first process of a class to the others, before these compile."""

import pathlib
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxhet._gpu import gpu_settings
from jaxhet._gpu import tuning as _tuning
from jaxhet._gpu.tuning import Tuning
from jaxhet._job import membership
from jaxhet._job.coordinator import Coordinator
from jaxhet._job.process_info import ProcessInfo
from jaxhet._job.terms import Terms

_MEMBERS = (2, 3, 5)


def _nobody_failed() -> bool:
    return False


class _Class:
    """The processes of a tuning class; messages are heard at once."""

    def __init__(self, folder: pathlib.Path, timeout_s: float = 20, key: str = "class"):
        self.messages: list[dict[str, Any]] = []
        self.folders = {process: folder / f"process{process}" for process in _MEMBERS}
        for path in self.folders.values():
            path.mkdir(exist_ok=True)
        self.tunings = {
            process: Tuning(path, _MEMBERS, process, self._tell, timeout_s, key=key)
            for process, path in self.folders.items()
        }

    def _tell(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        for process in message["to"]:
            self.tunings[process].hear(message)

    def before(
        self,
        process: int,
        program: str = "p",
        module: str = "m",
        among: Sequence[int] = _MEMBERS,
        is_over: Callable[[], bool] = _nobody_failed,
    ) -> None:
        self.tunings[process].before(program, module, among, is_over)

    def tune(self, process: int, program: str, **results: str) -> None:
        """Compiles a program for which XLA tunes kernels with these results."""
        self.before(process, program)
        for name, content in results.items():
            (self.folders[process] / name).write_text(content)
        self.tunings[process].after(program)

    def files(self, process: int) -> dict[str, bytes]:
        folder = self.folders[process]
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_others_wait_for_the_first_and_have_its_files_then(tmp_path: pathlib.Path) -> None:
    processes = _Class(tmp_path)
    passed: list[int] = []

    def compile_at(process: int) -> None:
        processes.before(process)
        assert processes.files(process) == {"gemm_1.textproto": b"tile: 7", "v1/conv.pb": b"\0\1"}
        passed.append(process)

    threads = [threading.Thread(target=compile_at, args=(p,)) for p in (3, 5)]
    for thread in threads:
        thread.start()
    processes.before(2)
    time.sleep(0.1)
    assert not passed
    (processes.folders[2] / "gemm_1.textproto").write_bytes(b"tile: 7")
    (processes.folders[2] / "v1").mkdir()
    (processes.folders[2] / "v1" / "conv.pb").write_bytes(b"\0\1")
    processes.tunings[2].after("p")
    for thread in threads:
        thread.join()
    assert sorted(passed) == [3, 5]


def test_each_file_is_sent_once_and_results_of_earlier_jobs_too(tmp_path: pathlib.Path) -> None:
    processes = _Class(tmp_path)
    leader = processes.folders[2]
    (leader / "earlier").write_text("a")
    (processes.folders[3] / "earlier").write_text("own choice of a job that waited in vain")
    processes.tune(2, "p")
    processes.tune(2, "q", later="b")
    processes.tunings[2].after("q")
    assert [sorted(m["files"]) for m in processes.messages] == [["earlier"], ["later"]]
    assert processes.files(3) == {"earlier": b"a", "later": b"b"}


def test_many_files_are_several_messages_and_the_last_one_completes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tuning, "_MOST_BYTES", 100)
    processes = _Class(tmp_path)
    for i in range(10):
        (processes.folders[2] / f"f{i}").write_bytes(random.Random(i).randbytes(50))
    processes.tune(2, "p")
    assert len(processes.messages) > 2
    assert [m["program"] for m in processes.messages[:-1]] == [""] * (len(processes.messages) - 1)
    assert len(processes.files(5)) == 10


def test_wait_ends_at_the_deadline_in_words(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    processes = _Class(tmp_path, timeout_s=0.3)
    processes.before(3)
    said = capfd.readouterr().err
    assert "process 2 has not tuned a program within 0.3 s; this process tunes its own" in said
    assert "JAXHET_TUNING_TIMEOUT_S" in said
    start = time.monotonic()
    processes.before(3)
    assert time.monotonic() - start < 0.2


def test_wait_ends_when_the_job_fails(tmp_path: pathlib.Path) -> None:
    _Class(tmp_path).before(3, is_over=lambda: True)


@pytest.mark.parametrize(
    "name", ["../evil", "a/../b", "/a", "a//b", ".hidden", "a/.b", "", "x" * 300]
)
def test_file_with_another_kind_of_name_is_left_out(tmp_path: pathlib.Path, name: str) -> None:
    processes = _Class(tmp_path)
    processes.tunings[3].hear({"files": {name: ""}, "program": "p"})
    assert processes.files(3) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process2", "process3", "process5"]


def test_process_alone_in_its_class_waits_for_nobody(tmp_path: pathlib.Path) -> None:
    def tell(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    tuning = Tuning(tmp_path, [4], 4, tell, 1)
    tuning.before("p", "m", [4], _nobody_failed)
    (tmp_path / "f").touch()
    tuning.after("p")


def test_process_does_not_wait_for_one_that_takes_no_part_in_the_program(
    tmp_path: pathlib.Path,
) -> None:
    processes = _Class(tmp_path)
    processes.before(3, among=(3,))  # a program of this island alone
    waiting = threading.Thread(target=processes.before, args=(5,), kwargs={"among": (3, 5)})
    waiting.start()
    processes.before(3, among=(3, 5))
    (processes.folders[3] / "kernel").write_text("3's choice")
    processes.tunings[3].after("p")
    waiting.join(20)
    assert not waiting.is_alive()
    assert processes.files(5) == processes.files(2) == {"kernel": b"3's choice"}


# --- a second run ---


def _second_run(folder: pathlib.Path, key: str = "class", module: str = "m") -> list[int]:
    """The processes that do not wait until the first has compiled, in a job after another one."""
    later = _Class(folder, timeout_s=0.2, key=key)
    later.before(2, module=module)
    known = {process for message in later.messages for process in message["to"]}
    return [p for p in known if "p" in later.tunings[p]._tuned]


def test_second_run_does_not_wait(tmp_path: pathlib.Path) -> None:
    _Class(tmp_path).tune(2, "p", a="1", b="2")
    assert _second_run(tmp_path) == [3, 5]
    assert _second_run(tmp_path) == [3, 5]


def _lose_at(process: int) -> Callable[[pathlib.Path], None]:
    return lambda folder: (folder / f"process{process}" / "a").unlink()


def _change_at(process: int) -> Callable[[pathlib.Path], Any]:
    return lambda folder: (folder / f"process{process}" / "a").write_text("own choice")


@pytest.mark.parametrize(
    ("damage", "without"),
    [
        (_lose_at(2), []),
        (_change_at(2), []),
        (_lose_at(3), [5]),
        (_change_at(5), [3]),
        (lambda folder: (folder / "process2.json").unlink(), []),
        (lambda folder: (folder / "process2.json").write_text("{"), []),
    ],
)
def test_second_run_waits_where_results_were_lost_or_changed(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], Any], without: list[int]
) -> None:
    _Class(tmp_path).tune(2, "p", a="1", b="2")
    damage(tmp_path)
    assert _second_run(tmp_path) == without


def test_second_run_of_another_class_or_module_waits(tmp_path: pathlib.Path) -> None:
    _Class(tmp_path).tune(2, "p", a="1")
    assert _second_run(tmp_path, key="newer driver") == []
    assert _second_run(tmp_path, module="of other options") == []


def test_results_that_the_compiler_did_not_take_are_told(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _Class(tmp_path).tune(2, "p", a="1")
    later = _Class(tmp_path)
    later.tune(2, "p", tuned_again="2")
    said = capfd.readouterr().err
    assert "XLA has tuned kernels of a program again, though their results are in" in said
    assert later.files(3) == {"a": b"1", "tuned_again": b"2"}
    # Result of a program of one device, which no record mentions.
    (later.folders[2] / "elsewhere").write_text("3")
    quiet = _Class(tmp_path)
    quiet.tune(2, "p")
    assert [m for m in quiet.messages if "known" in m]
    assert "again" not in capfd.readouterr().err


def test_folder_is_beside_the_compilation_cache_or_goes_with_the_job(
    tmp_path: pathlib.Path,
) -> None:
    kept = _tuning.folder(3, str(tmp_path))
    assert kept == tmp_path / "jaxhet_autotune" / "process3"
    temporary = _tuning.folder(3, None)
    assert temporary.parent == pathlib.Path(tempfile.gettempdir())
    for path in (kept, temporary):
        Tuning(path, [3], 3, lambda m: None, 1).close()
    assert kept.is_dir()
    assert not temporary.exists()


@pytest.mark.parametrize(
    ("flags", "is_shared"),
    [
        ({}, True),
        ({"xla_gpu_autotune_level": "4"}, True),
        ({"xla_gpu_autotune_level": "0"}, False),
        ({"xla_gpu_load_autotune_results_from": "x"}, False),
        ({"xla_gpu_per_fusion_autotune_cache_dir": "x"}, False),
    ],
)
def test_flags_of_the_user_win(flags: dict[str, str], is_shared: bool) -> None:
    assert _tuning.is_shared(flags) is is_shared


def test_tuning_is_on_and_the_log_says_what_was_added(tmp_path: pathlib.Path) -> None:
    completed = gpu_settings.complete("--a=1", {_tuning.CACHE_FLAG: str(tmp_path)})
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
        members[0].tell_tuned(message)
    time.sleep(0.3)
    heard: list[dict[str, Any]] = []
    done = threading.Event()

    def hear(message: dict[str, Any]) -> None:
        heard.append(message)
        if len(heard) == len(sent):
            done.set()

    members[1].listen_tuned(hear)
    for message in sent[2:]:
        members[0].tell_tuned(message)
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
