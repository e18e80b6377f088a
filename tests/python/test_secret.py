"""Files of job secrets: who may read and write them."""

import os
import pathlib

import pytest

from jaxhet import _config
from jaxhet._errors import UsageError
from jaxhet._net.secret import read_secret


def _read(file: pathlib.Path, mode: int) -> bytes:
    file.write_text("a secret of a file\n")
    file.chmod(mode)
    return read_secret(_config.resolve({"job_secret_file": str(file)}, {}))


@pytest.mark.parametrize(
    ("mode", "verbs"),
    [(0o604, "read"), (0o602, "write"), (0o666, "read and write")],
    ids=["read", "write", "both"],
)
def test_secret_file_open_to_everybody_is_refused(
    mode: int, verbs: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "secret"
    words = (
        f"everybody on this machine can {verbs} JAXHET_JOB_SECRET_FILE {file} \\(mode"
        f" {mode:04o}\\): run `chmod 600` on it"
    )
    with pytest.raises(UsageError, match=words):
        _read(file, mode)


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_secret_file_of_a_user_or_a_group_is_read(mode: int, tmp_path: pathlib.Path) -> None:
    assert _read(tmp_path / "secret", mode) == b"a secret of a file"


def test_secret_that_is_no_regular_file_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in (tmp_path / "fifo", tmp_path, "/dev/zero"):
        with pytest.raises(UsageError, match=f"FILE {name} is not a regular file, which all"):
            read_secret(_config.resolve({"job_secret_file": str(name)}, {}))


def test_secret_file_that_is_gone_is_said(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    words = (
        f"can't read JAXHET_JOB_SECRET_FILE {file}: No such file or directory; every process reads"
        " the file when it joins, so keep it until the job has started"
    )
    with pytest.raises(UsageError, match=words):
        read_secret(_config.resolve({"job_secret_file": str(file)}, {}))


def test_secret_that_can_be_guessed_is_refused() -> None:
    words = "the job secret has 15 bytes; one of less than 16 can be guessed: make one by `openssl"
    with pytest.raises(UsageError, match=words):
        read_secret(_config.resolve({"job_secret": "15 bytes are it"}, {}))
