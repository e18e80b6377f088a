"""`jaxhet launch --hosts`: two hosts train.

In the quick test an ssh that runs the commands here stands for both hosts. In the slow tests both
hosts are OpenSSH's own server, at two loopback addresses.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.support import sshd
from tests.support.fake_ssh import FakeSsh
from tests.support.jobs import ROOT
from tests.support.scripts import environment
from tests.support.two_hosts import PROGRAM, expected

_CLUSTER = """
coordinator: 127.0.0.1
env: {JAXHET_TRANSPORTS: socket}
hosts:
  - {island: a, host: h0, directory: DIRECTORY, python: PYTHON, devices: 2,
     env: {JAXHET_SOCKET_ADDRESS: 127.0.0.2}}
  - {island: b, host: h1, directory: DIRECTORY, python: PYTHON, devices: 2,
     env: {JAXHET_SOCKET_ADDRESS: 127.0.0.3}}
"""


def _launch(
    folder: pathlib.Path, cluster: str, environ: Mapping[str, str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs the program in this folder on the hosts of a cluster file."""
    (folder / "train.py").write_text(PROGRAM)
    file = folder / "cluster.yaml"
    file.write_text(cluster.replace("DIRECTORY", str(folder)).replace("PYTHON", sys.executable))
    command = [sys.executable, "-m", "jaxhet.cli", "launch", "--hosts", str(file)]
    return subprocess.run(
        [*command, "--", "python", "train.py"],
        check=False,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def _assert_trained(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if "loss" in line)
    assert [line.split()[0] for line in lines] == ["[a/0]", "[b/1]"]
    for line in lines:
        _, _, loss, *rest = line.split(maxsplit=3)
        assert abs(float(loss) - expected()) < 1e-6
        assert rest == ["2 4 ['socket']"]


def test_two_hosts_train_as_one_program(tmp_path: pathlib.Path):
    ssh = FakeSsh.make(tmp_path / "ssh")
    _assert_trained(_launch(tmp_path, _CLUSTER, ssh.environ))


# OpenSSH's own server.

needs_sshd = pytest.mark.skipif(bool(sshd.unavailable()), reason=sshd.unavailable() or "available")


@pytest.fixture(scope="module")
def ssh_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with sshd.running(tmp_path_factory.mktemp("sshd")) as options:
        yield options


def _cluster_of(options: list[str]) -> str:
    hosts = _CLUSTER.replace("host: h0", "host: 127.0.0.1").replace("host: h1", "host: 127.0.0.2")
    return f"ssh: {json.dumps(options)}{hosts}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_sshd
def test_two_hosts_of_openssh_train_as_one_program(ssh_options: list[str], tmp_path: pathlib.Path):
    _assert_trained(_launch(tmp_path, _cluster_of(ssh_options), environment(), 600))
