"""`jaxhet launch --hosts` with an ssh that runs the commands on this machine; without JAX."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from jaxhet._errors import UsageError
from jaxhet.cli import _cluster, _ssh, launch
from tests.support.fake_ssh import FakeSsh
from tests.support.waiting import is_running, wait_until

_TIMEOUT_S = 60
_CLUSTER = """
coordinator: 127.0.0.1
hosts:
  - {island: nv, host: nv0, directory: DIRECTORY, python: PYTHON}
  - {island: amd, host: amd0, directory: DIRECTORY, python: PYTHON, devices: 3, env: {OWN: 1}}
"""
_PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
process = int(os.environ["JAXHET_PROCESS_ID"])
"""


@pytest.fixture
def ssh(tmp_path: pathlib.Path) -> FakeSsh:
    return FakeSsh.make(tmp_path / "ssh")


def _file(folder: pathlib.Path, text: str = _CLUSTER) -> pathlib.Path:
    path = folder / "cluster.yaml"
    path.write_text(text.replace("DIRECTORY", str(folder)).replace("PYTHON", sys.executable))
    return path


def _popen(ssh: FakeSsh, cluster: pathlib.Path, code: str, *options: str) -> subprocess.Popen[str]:
    script = _PRELUDE + textwrap.dedent(code)
    command = [sys.executable, "-m", "jaxhet.cli", "launch", "--hosts", str(cluster), *options]
    return subprocess.Popen(
        [*command, "--", "python", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ssh.environ, "NOT_SENT": "1", "JAXHET_TRANSPORTS": "socket"},
    )


def _run(ssh: FakeSsh, cluster: pathlib.Path, code: str, *options: str) -> tuple[int, str, str]:
    with _popen(ssh, cluster, code, *options) as popen:
        out, err = popen.communicate(timeout=_TIMEOUT_S)
    return popen.returncode, out, err


def test_processes_know_their_place_and_the_secret_is_in_no_argument_of_ssh(
    ssh: FakeSsh, tmp_path: pathlib.Path
):
    code = """
    shown = {k: v for k, v in os.environ.items() if k.startswith("JAXHET_")}
    others = {k: os.environ.get(k) for k in ("THIS_HOST", "OWN", "NOT_SENT", "JAX_PLATFORMS")}
    print(json.dumps({**shown, **others, "cwd": os.getcwd(), "python": sys.executable}))
    """
    returncode, out, err = _run(ssh, _file(tmp_path), code)
    assert returncode == 0, err
    lines = sorted(line for line in out.splitlines() if "greeting" not in line)
    assert [line.partition(" ")[0] for line in lines] == ["[amd/1]", "[nv/0]"]
    amd, nv = (json.loads(line.partition(" ")[2]) for line in lines)
    assert (nv["THIS_HOST"], nv.get("JAXHET_CPU_DEVICES"), nv["OWN"]) == ("nv0", None, None)
    assert (amd["THIS_HOST"], amd["JAXHET_CPU_DEVICES"], amd["OWN"]) == ("amd0", "3", "1")
    for told, process in ((nv, "0"), (amd, "1")):
        assert told["JAXHET_PROCESS_ID"] == process
        assert told["JAXHET_ISLANDS"] == "nv,amd"
        assert told["JAXHET_TRANSPORTS"] == "socket"
        assert told["JAX_PLATFORMS"] == "cpu"
        assert told["NOT_SENT"] is None
        assert told["cwd"] == str(tmp_path)
        assert os.path.dirname(told["python"]) == os.path.dirname(sys.executable)
    secret = nv["JAXHET_JOB_SECRET"]
    assert secret == amd["JAXHET_JOB_SECRET"]
    assert len(secret) == 64
    calls = ssh.calls()
    assert sorted(str(call["host"]) for call in calls) == ["amd0", "nv0"]
    for call in calls:
        assert secret not in json.dumps(call)
        assert "NOT_SENT" in call["environ"]  # type: ignore[operator]
        assert not [k for k in call["environ"] if k.startswith("JAXHET_")]  # type: ignore[union-attr]


def test_ssh_that_fails_on_one_host_is_said_in_words(ssh: FakeSsh, tmp_path: pathlib.Path):
    ssh.fail("amd0", "ssh: connect to host amd0 port 22: Connection refused")
    returncode, _, err = _run(ssh, _file(tmp_path), "time.sleep(1000)", "--grace", "0.2")
    assert returncode == 255
    assert (
        "failed first: process 1 (amd on amd0): ssh to amd0 ended before the command was started"
        " (exit code 255); it said: ssh: connect to host amd0 port 22: Connection refused; it must"
        " log in without a password, and the directory and a python that has jaxhet must be there\n"
    ) in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("directory: DIRECTORY", "directory: /no/such/folder", "/no/such/folder"),
        ("python: PYTHON", "python: no-such-python", "no-such-python"),
    ],
)
def test_host_without_the_directory_or_python_is_said_in_words(
    old: str, new: str, words: str, ssh: FakeSsh, tmp_path: pathlib.Path
):
    returncode, _, err = _run(
        ssh, _file(tmp_path, _CLUSTER.replace(old, new, 1)), "time.sleep(1000)", "--grace", "0"
    )
    assert returncode > 0
    assert "ssh to nv0 ended before the command was started" in err
    assert words in err


def test_command_that_a_host_does_not_have(ssh: FakeSsh, tmp_path: pathlib.Path):
    command = [sys.executable, "-m", "jaxhet.cli", "launch", "--hosts", str(_file(tmp_path))]
    ended = subprocess.run(
        [*command, "--", "no-such-program"],
        check=False,
        env=ssh.environ,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert ended.returncode == 1
    assert "cannot run 'no-such-program': No such file or directory" in ended.stderr


def test_signal_reaches_the_commands_and_they_decide(ssh: FakeSsh, tmp_path: pathlib.Path):
    code = """
    def handle(number, frame):
        print("got", number)
        sys.exit(0)
    signal.signal(signal.SIGTERM, handle)
    print("ready")
    while True:
        time.sleep(0.1)
    """
    with _popen(ssh, _file(tmp_path), code) as popen:
        assert popen.stdout is not None
        ready = 0
        while ready < 2:
            ready += popen.stdout.readline().endswith("ready\n")
        popen.send_signal(signal.SIGTERM)
        out, err = popen.communicate(timeout=_TIMEOUT_S)
    assert out.count(f"got {int(signal.SIGTERM)}") == 2, err
    assert popen.returncode == 0


@pytest.mark.parametrize("victim", ["launcher", "ssh"])
def test_nothing_survives_the_sigkill_of(victim: str, ssh: FakeSsh, tmp_path: pathlib.Path):
    code = f"""
    folder = pathlib.Path({str(tmp_path)!r})
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=2)
    (folder / f"{{child.pid}}.pid").touch()
    (folder / f"{{os.getpid()}}.pid").touch()
    time.sleep(1000)
    """
    with _popen(ssh, _file(tmp_path), code, "--grace", "0") as popen:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 4, _TIMEOUT_S)
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        if victim == "launcher":
            popen.kill()
        else:
            os.kill(int(next(ssh.folder.glob("*.json")).stem), signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), _TIMEOUT_S)
        popen.communicate(timeout=_TIMEOUT_S)


# The file.


def test_cluster_file_with_all_keys(tmp_path: pathlib.Path):
    text = """
    coordinator: 10.0.0.1
    ssh: [-p, 2222]
    env: {A: 1, B: x}
    hosts:
      - {island: amd, host: me@amd0, processes: 2, devices: 4, env: {B: y}}
      - {island: nv}
      - {island: amd, host: amd1}
    """
    cluster = _cluster.read(_file(tmp_path, textwrap.dedent(text)))
    assert cluster.ssh == ("-p", 2222)
    places = _cluster.places(cluster, {"amd": {}, "nv": {"B": "z"}})
    assert [(p.host.island, p.host.host, p.wanted, p.index) for p in places] == [
        ("amd", "me@amd0", (4, 4), 0),
        ("amd", "me@amd0", (4, 4), 1),
        ("amd", "amd1", (None,), 0),
        ("nv", None, (None,), 0),
    ]
    assert [place.env for place in places] == [{"A": "1", "B": b} for b in "yyxz"]
    command = _ssh.command("me@amd0", None, "python3", cluster.ssh)
    assert command[:3] == ["ssh", "-p", "2222"]
    assert command[-3:-1] == ["--", "me@amd0"]


_GOOD = "coordinator: 127.0.0.1\nhosts: [{island: a}]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: [", "is not YAML: while parsing"),
        (
            "hosts: [{island: a}]\n",
            r"\S+ lacks coordinator; its fields are coordinator, hosts, ssh, env",
        ),
        ("coordinator: 127.0.0.1\nhosts: []\n", "hosts is empty; name at least one host"),
        (
            _GOOD.replace("{island: a}", "{host: b}"),
            "entry 0 of hosts of .* lacks island; its fields are island, host",
        ),
        (
            _GOOD.replace("a}", "a, device: 1}"),
            "entry 0 of hosts of .* has unknown 'device'; its fields are island, host",
        ),
        (
            _GOOD.replace("a}", "a, devices: 0}"),
            r"entry 0 of hosts has a number of processes or devices below 1",
        ),
        (_GOOD.replace("a}", "a, host: -oProxyCommand=x}"), "does not begin with -"),
        (
            _GOOD.replace("a}", "a, env: {X: yes}}"),
            "env of entry 0 of hosts of .* is True, which is no str . int . float",
        ),
        (
            _GOOD.replace("a}", "a, python: python3.12}"),
            "has python, which is for hosts that ssh reaches",
        ),
    ],
)
def test_cluster_file_that_is_wrong(text: str, words: str, tmp_path: pathlib.Path):
    with pytest.raises(UsageError, match=words):
        _cluster.read(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            _GOOD,
            launch.Options(islands=3),
            "--islands can't be combined with --hosts, whose file says",
        ),
        (
            _GOOD,
            launch.Options(island_env=(("b", "X", "1"),)),
            "--island-env b:X=1 names no island of a",
        ),
        (
            _GOOD.replace("a}", "a, directory: /no/such}"),
            launch.Options(),
            "there is no folder '/no/such' on this machine",
        ),
    ],
)
def test_cluster_that_does_not_fit(
    text: str, options: launch.Options, words: str, tmp_path: pathlib.Path
):
    options = dataclasses.replace(options, hosts=_file(tmp_path, text))
    with pytest.raises(UsageError, match=words):
        _cluster.places(c := launch.cluster_of(options), launch.island_envs(options, c.islands))


def test_cluster_file_that_is_missing(tmp_path: pathlib.Path):
    with pytest.raises(UsageError, match="can't be read: No such file or directory"):
        _cluster.read(tmp_path / "none.yaml")


def test_coordinator_address_of_another_machine():
    with pytest.raises(UsageError, match=r"coordinator: '192\.0\.2\.1' is not an address of this"):
        launch.hold_port(0, "192.0.2.1")
