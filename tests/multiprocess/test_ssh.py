"""`deploy/ssh/job.sh` over OpenSSH's own server, at two loopback addresses: two hosts train."""

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from jaxhet.testing import free_port
from tests.support import sshd
from tests.support.jobs import ROOT
from tests.support.two_hosts import PROGRAM, expected
from tests.support.waiting import is_running, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(sshd.unavailable()), reason=sshd.unavailable() or "available"),
]


def _start(folder: pathlib.Path, options: list[str], code: str) -> subprocess.Popen[str]:
    """Starts the script; hosts have the environment of a login, where JAXHET_* come from it."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shlex.join([str(shutil.which("ssh")), *options])} "$@"\n')
    ssh.chmod(0o755)
    secret = folder / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    (folder / "train.py").write_text(code)
    env = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "JAXHET_JOB_SECRET_FILE": str(secret),
        "JAXHET_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
    }
    settings = ["JAX_PLATFORMS=cpu", "JAXHET_CPU_DEVICES=2", "JAXHET_TRANSPORTS=socket"]
    program = ["env", *settings, f"PYTHONPATH={ROOT}", sys.executable, "train.py"]
    script = ["sh", str(ROOT / "deploy" / "ssh" / "job.sh"), "127.0.0.1", "127.0.0.2", *program]
    pipe = subprocess.PIPE
    return subprocess.Popen(script, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def test_two_hosts_train_as_one_program(tmp_path: pathlib.Path) -> None:
    with sshd.running(tmp_path) as options, _start(tmp_path, options, PROGRAM) as job:
        out, err = job.communicate(timeout=300)
        assert job.returncode == 0, out + err
        lines = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("loss")]
        assert len(lines) == 2
        for _, loss, rest in lines:
            assert abs(float(loss) - expected()) < 1e-6
            assert rest == "2 4 ['socket']"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_script(number: int, tmp_path: pathlib.Path) -> None:
    code = "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(999)"
    with sshd.running(tmp_path) as options, _start(tmp_path, options, code) as job:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        job.send_signal(number)
        wait_until(lambda: not any(map(is_running, pids)), 30)
        assert job.wait(30) != 0
