"""A process that has not noticed a failure of its job: when it is ended, and how it ends itself.

tests/faults/test_unnoticed.py has a whole job.
"""

import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jaxhet
from jaxhet import _config, _ffi, _islands, _saves, _session
from jaxhet._errors import PeerError
from jaxhet._jax import compat
from jaxhet._saves import Save, Saves
from jaxhet._session import Session
from tests.support.fake_engine import FakeEngine
from tests.support.members import described

NOTICE_S = 0.2
EXIT_AFTER_S = 1.0  # more than a loaded machine keeps a thread from its turn
FAILURE = "process 1 is gone"


class Watched:
    """A session in use, and what its watch does to the process."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        stand_in: Any = self.engine
        members = [described(i, name) for i, name in enumerate("ab")]
        config = _config.resolve({"exit_timeout_s": 10 * EXIT_AFTER_S}, environ={})
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self.exit_codes: list[int] = []
        self.session = Session(config, 0, _islands.make_islands(members, ()), stand_in)

    def fail(self) -> None:
        """Fails the job."""
        self.engine.fail("PeerError", FAILURE)

    def end(self, code: int) -> None:
        """Stands in for os._exit."""
        self.exit_codes.append(code)
        self.ended.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(_session, "_NOTICE_S", NOTICE_S)
    monkeypatch.setattr(_saves, "_LOOK_EVERY_S", 0.02)
    watched = Watched()
    monkeypatch.setattr(os, "_exit", watched.end)
    monkeypatch.setattr(_ffi, "fail_exit", watched.exit_codes.append)
    monkeypatch.setattr(compat, "cancel_barriers", watched.cancelled.set)
    monkeypatch.setattr(compat, "disconnect_client", lambda: None)
    _session.install(watched.session)
    yield watched
    _session.remove()
    watched.session.acknowledge()
    watched.session.close(0)


@contextlib.contextmanager
def _growing(file: pathlib.Path) -> Iterator[None]:
    """A file that a thread appends to all the time."""
    stop = threading.Event()

    def write() -> None:
        with file.open("ab", buffering=0) as opened:
            while not stop.wait(0.02):
                opened.write(b"x")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_process_is_not_ended_while_its_save_makes_progress(
    watched: Watched, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with jaxhet.saving(tmp_path):
        with _growing(tmp_path / "part"):
            watched.fail()
            assert not watched.ended.wait(2 * (NOTICE_S + EXIT_AFTER_S))
            assert not watched.cancelled.is_set()
        stopped = time.monotonic()
        assert watched.ended.wait(5)
        assert time.monotonic() - stopped > EXIT_AFTER_S
    assert watched.cancelled.is_set()
    assert watched.exit_codes == [70]
    words = f"the save to {tmp_path} is not complete: nothing has changed there for 1 s"
    assert words in capsys.readouterr().err


def test_files_that_no_save_writes_do_not_count(watched: Watched, tmp_path: pathlib.Path) -> None:
    with _growing(tmp_path / "part"):
        watched.fail()
        assert watched.ended.wait(5)


def test_save_beyond_its_limit_is_not_waited_for(
    watched: Watched, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with jaxhet.saving(tmp_path, limit_s=0.5), _growing(tmp_path / "part"):
        watched.fail()
        assert watched.ended.wait(5)
    words = "0.5 s after the failure (limit_s of jaxhet.saving) it goes on"
    assert words in capsys.readouterr().err


def test_program_that_knows_of_the_failure_is_left_alone(watched: Watched) -> None:
    watched.fail()
    assert isinstance(jaxhet.last_error(), PeerError)
    watched.session._watcher.join(5)
    assert not watched.ended.is_set()


# Progress.


def _rewrite(folder: pathlib.Path) -> None:
    os.utime(folder / "old", ns=(1, 1 << 62))


@pytest.mark.parametrize(
    ("change", "is_progress"),
    [
        (lambda folder: (folder / "new").touch(), True),
        (lambda folder: (folder / "deep" / "new").mkdir(), True),
        (lambda folder: (folder / "old").write_bytes(b"longer than before"), True),
        (_rewrite, True),
        (lambda folder: (folder / "old").unlink(), True),
        (lambda folder: (folder / "old").rename(folder / "deep" / "moved"), True),
        (lambda folder: (folder / "old").read_bytes(), False),
        (lambda folder: (folder.parent / "beside").touch(), False),
    ],
    ids=["file", "folder", "growth", "rewritten", "deleted", "renamed", "read", "elsewhere"],
)
def test_progress_is_a_change_in_the_folder(
    change: Callable[[pathlib.Path], object],
    is_progress: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_saves, "_LOOK_EVERY_S", 0)
    monkeypatch.setattr(_saves, "_LOOK_SHARE", float("inf"))
    folder = tmp_path / "saves"
    (folder / "deep").mkdir(parents=True)
    (folder / "old").write_bytes(b"old")
    for path in (folder, folder / "deep", folder / "old"):
        os.utime(path, ns=(1, 1))
    saves = Saves()
    with saves.under_way(Save(folder, 10)):
        assert not saves.have_progressed(0)
        change(folder)
        assert saves.have_progressed(0) == is_progress
        assert not saves.have_progressed(0)


def test_folder_that_is_not_there_yet_is_no_error(tmp_path: pathlib.Path) -> None:
    saves = Saves()
    with saves.under_way(Save(tmp_path / "later", 10)):
        assert not saves.have_progressed(0)
    assert saves.current() == []


def test_large_folders_are_looked_at_less_often(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def slow(folder: pathlib.Path) -> _saves.Snapshot:
        time.sleep(0.05)
        looks.append(folder)
        return 0, 0, 0

    monkeypatch.setattr(_saves, "_snapshot", slow)
    saves = Saves()
    with saves.under_way(Save(tmp_path, 10)):
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:
            saves.have_progressed(0)
            time.sleep(0.01)
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("folder", "limit_s", "words"),
    [
        ("gs://bucket/run", 1, "can't see the progress of a save to 'gs://bucket/run': give it a"),
        ("folder", -1, "limit_s=-1 of jaxhet.saving is below 0 seconds"),
    ],
)
def test_save_that_cannot_be_watched_is_refused(folder: str, limit_s: float, words: str) -> None:
    with pytest.raises(jaxhet.UsageError) as told, jaxhet.saving(folder, limit_s=limit_s):
        pass
    assert words in str(told.value)


def test_saving_outside_of_a_job_does_nothing(tmp_path: pathlib.Path) -> None:
    with jaxhet.saving(tmp_path):
        assert _session.current() is None


# The exit code.


def test_leaving_with_a_failure_that_nobody_was_told_of_is_no_success(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.fail()
    watched.session.close(0)
    assert watched.exit_codes == [70]
    said = capsys.readouterr().err
    assert f"leaves its job as if that had not failed: {FAILURE}" in said
    assert "its exit code is 70, not 0" in said
    assert "jaxhet.last_error() returns it" in said


def test_leaving_after_the_error_was_raised_has_the_programs_exit_code(watched: Watched) -> None:
    watched.fail()
    with pytest.raises(PeerError):
        jaxhet.jit(lambda x: x)(1)
    watched.session.close(0)
    assert watched.exit_codes == []


@pytest.mark.parametrize(
    ("error", "codes"),
    [(ValueError("mine"), []), (SystemExit(3), []), (SystemExit(0), [70]), (SystemExit(), [70])],
    ids=repr,
)
def test_program_that_ends_by_an_exception_has_its_exit_code(
    error: BaseException, codes: list[int], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_exc", raising=False)
    watched.fail()
    try:
        raise error
    except BaseException:
        watched.session.close(0)
    assert watched.exit_codes == codes


@pytest.mark.parametrize(("code", "fails"), [(0, False), (None, False), (3, True), ("no", True)])
def test_only_exits_that_are_no_success_fail_the_job(
    code: object, fails: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "last_exc", raising=False)
    try:
        raise SystemExit(code)
    except SystemExit:
        watched.session.close(0)
    assert watched.engine.failed.is_set() == fails
