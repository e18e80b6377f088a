"""A process of a job on another host: ssh runs `jaxhet._launch.remote` and carries its data.

The job secret is written to ssh's stdin once `jaxhet._launch.remote` says that it reads. The secret
is never in the arguments of ssh, or in its environment.
"""

import contextlib
import selectors
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import IO

from jaxhet import _config, _options
from jaxhet._launch import remote as _remote
from jaxhet.cli._lines import write
from jaxhet.cli._process import Process, ending

# No terminal, no question for a password, and exit if the host does not answer for 60 s.
_OPTIONS = (
    "-T",
    *("-oBatchMode=yes", "-oConnectTimeout=15"),
    *("-oServerAliveInterval=15", "-oServerAliveCountMax=4"),
)
_SIGNALS = range(1, signal.NSIG)


def command(
    host: str, directory: str | None, python: str, options: tuple[str | int, ...]
) -> list[str]:
    """The command of ssh. The user's options are first: ssh uses the first value of an option."""
    remote = f"exec {shlex.quote(python)} -P -m {_remote.__name__}"
    if directory is not None:
        remote = f"cd {shlex.quote(directory)} && {remote}"
    return ["ssh", *map(str, options), *_OPTIONS, "--", host, remote]


class SshProcess(Process):
    """A process of another host; `popen` is its ssh."""

    def __init__(
        self,
        label: str,
        ssh: list[str],
        order: _remote.Order,
        guardian_fd: int,
        environ: Mapping[str, str],
    ):
        """Starts ssh in the launcher's environment without the variables of the job."""
        self._order = order
        self._host = ssh[-2]
        self._is_ready = False
        env = {k: v for k, v in environ.items() if not k.startswith(_options.PREFIX)}
        super().__init__(label, ssh, env, guardian_fd, subprocess.PIPE)

    def poll(self) -> int | None:
        """Exit code of the command if ssh passed it on; see `Process.poll`."""
        code = super().poll()
        if self._is_ready and code is not None and code - _remote.SIGNALLED in _SIGNALS:
            return _remote.SIGNALLED - code
        return code

    def signal_group(self, number: int) -> bool:
        """Signals the command's group, or ssh if the group has ended.

        SIGKILL ends ssh: `jaxhet._launch.remote` kills the group when the connection has ended.
        """
        if number == signal.SIGKILL:
            self._close_stdin()
        elif number and self._is_ready and self.popen.poll() is None:
            self._send(b"%d\n" % number)
            return True
        return super().signal_group(number)

    def summary(self) -> str:
        """The summary of `Process`, or the reason why the command was never started."""
        if self._is_ready or not self.returncode or self.stopped_by:
            return super().summary()
        said = f"; it said: {self.last_words}" if self.last_words else ""
        return (
            f"{self.label}: ssh to {self._host} ended before the command was started"
            f" ({ending(self.returncode)}){said}; it must log in without a password, and the"
            " directory and a python that has jaxhet must be there"
        )

    def watch(
        self,
        selector: selectors.BaseSelector,
        stream: IO[bytes] | None,
        emit: Callable[[bytes], None],
    ) -> None:
        """Watches like `Process`, and hides the line that reports that the other end is ready."""

        def filtered(line: bytes) -> None:
            if stream is self.popen.stdout and not self._is_ready and line == _remote.READY:
                self._is_ready = True
                self._send(self._order.line())
            else:
                emit(line)

        super().watch(selector, stream, filtered)

    def _send(self, line: bytes) -> None:
        stdin = self.popen.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # the end of ssh is seen elsewhere
                write(stdin.fileno(), line)

    def _close_stdin(self) -> None:
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The options of jaxhet in the launcher's environment, which apply on all hosts."""
    own = (_options.PREFIX + "JOB_SECRET", _options.PREFIX + "JOB_SECRET_FILE")
    counting = _config.for_new_job(environ).items()
    return {k: v for k, v in counting if k.startswith(_options.PREFIX) and k not in own}
