"""OpenSSH's own server on a loopback address, with keys and settings of the test alone."""

import contextlib
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator

from jaxhet.testing import free_port
from tests.support.waiting import wait_until

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""


def unavailable() -> str:
    """The reason why no server can be started, or an empty text."""
    if _SSHD is None or shutil.which("ssh") is None:
        return "no sshd: `sh tools/setup.sh slow` installs openssh-server on Debian"
    return ""


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[list[str]]:
    """Runs a server; gives the options with which ssh logs in at 127.0.0.1 and 127.0.0.2."""
    assert _SSHD is not None
    port = free_port()
    for name in ("host_key", "user_key", "other_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized")
    public = (folder / "host_key.pub").read_text()
    hosts = (f"[127.0.0.{i}]:{port} {public}" for i in (1, 2))
    (folder / "known_hosts").write_text("".join(hosts))
    (folder / "sshd_config").write_text(_CONFIG.format(port=port, folder=folder))
    if os.getuid() == 0:
        pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it
    log = (folder / "sshd.log").open("w")
    server = subprocess.Popen(
        [_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log
    )
    try:
        wait_until(lambda: _answers(port), 30)
        yield [
            *("-F", "none", "-p", str(port), "-l", getpass.getuser()),
            *("-i", str(folder / "user_key"), "-oIdentitiesOnly=yes", "-oIdentityAgent=none"),
            *(f"-oUserKnownHostsFile={folder}/known_hosts", "-oStrictHostKeyChecking=yes"),
        ]
    finally:
        server.terminate()
        server.wait(20)
        log.close()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
