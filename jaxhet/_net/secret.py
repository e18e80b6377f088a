"""The job secret, as the user gives it."""

import os
import pathlib
import stat

from jaxhet._config import Config
from jaxhet._errors import UsageError

_LEAST_SECRET_BYTES = 16


def read_secret(config: Config) -> bytes:
    """The job secret.

    Raises:
      UsageError: The secret is missing or short, or its file is unreadable, or open to everybody.
    """
    secret = (config.job_secret or _secret_of_file(config.job_secret_file)).encode()
    if not secret:
        raise UsageError(
            "no job secret: give all processes of the job the same JAXHET_JOB_SECRET, or a"
            " JAXHET_JOB_SECRET_FILE that only you can read (for example made by `openssl rand -hex"
            " 32`); `jaxhet launch` makes one by itself"
        )
    if len(secret) < _LEAST_SECRET_BYTES:
        raise UsageError(
            f"the job secret has {len(secret)} bytes; one of less than {_LEAST_SECRET_BYTES} can be"
            " guessed: make one by `openssl rand -hex 32`"
        )
    return secret


def _secret_of_file(name: str | None) -> str:
    if not name:
        return ""
    try:
        mode = os.stat(name).st_mode
        if not stat.S_ISREG(mode):  # a read may never end
            raise UsageError(
                f"JAXHET_JOB_SECRET_FILE {name} is not a regular file, which all processes can read"
            )
        text = pathlib.Path(name).read_text().strip()
    except OSError as error:
        raise UsageError(
            f"can't read JAXHET_JOB_SECRET_FILE {name}: {error.strerror or error}; every process"
            " reads the file when it joins, so keep it until the job has started"
        ) from error
    if not text:
        raise UsageError(
            f"JAXHET_JOB_SECRET_FILE {name} is empty; make a secret by `openssl rand -hex 32`"
        )
    rights = {"read": stat.S_IROTH, "write": stat.S_IWOTH}
    if found := " and ".join(verb for verb, bit in rights.items() if mode & bit):
        raise UsageError(
            f"everybody on this machine can {found} JAXHET_JOB_SECRET_FILE {name} (mode"
            f" {stat.S_IMODE(mode):04o}): run `chmod 600` on it"
        )
    return text
