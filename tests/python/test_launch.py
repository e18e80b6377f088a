"""`jaxhet launch`, watched from outside. The processes are plain Python: they need no JAX."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from jaxhet._errors import UsageError
from jaxhet.cli import launch
from jaxhet.cli._lines import LineSplitter
from tests.support.waiting import is_running, wait_until

_LAUNCH = [sys.executable, "-m", "jaxhet.cli", "launch"]
_PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
process = int(os.environ["JAXHET_PROCESS_ID"])
"""
_TIMEOUT_S = 60


@pytest.fixture(autouse=True, scope="module")
def _interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, one under nohup SIGHUP; so would what it starts."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _command(options: str, code: str) -> list[str]:
    script = _PRELUDE + textwrap.dedent(code)
    return [*_LAUNCH, *options.split(), "--", sys.executable, "-c", script]


def _launch(options: str, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(options, code),
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, **env},
    )


@contextlib.contextmanager
def _launched(options: str, code: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(_command(options, code), stdout=pipe, stderr=pipe, text=True) as popen:
        try:
            yield popen
        finally:
            popen.kill()


def _pids(folder: pathlib.Path) -> list[int]:
    return [int(path.read_text()) for path in folder.iterdir()]


# Output.


def test_lines_have_the_prefix_of_their_process_and_streams_stay_apart():
    result = _launch("--island-names a,b", 'print("out"); print("err", file=sys.stderr)')
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[a/0] out", "[b/1] out"]
    assert sorted(result.stderr.splitlines()) == ["[a/0] err", "[b/1] err"]


def test_island_env_is_of_one_island_alone():
    options = "--island-env island1:NAME=a=b,c --island-env island1:OTHER= "
    code = 'print(os.environ.get("NAME", "none"), repr(os.environ.get("OTHER")))'
    result = _launch(options, code)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "[island0/0] none None",
        "[island1/1] a=b,c ''",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("island2:A=1", "names no island of island0, island1"), ("A=1", "ISLAND:NAME=VALUE")],
)
def test_island_env_that_does_not_fit(text: str, words: str):
    result = _launch(f"--island-env {text}", "pass")
    assert result.returncode != 0
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\n", b"\n"], [b"ab", b""]),
        ([b"10%\r20%\r", b"30%", b"\r40%\n"], [b"40%"]),
        ([b"10%\r", b"20%\r"], [b"20%"]),
        ([b"windows\r\n"], [b"windows"]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
        ([b""], []),
    ],
)
def test_line_splitter(pieces: list[bytes], lines: list[bytes]):
    seen: list[bytes] = []
    splitter = LineSplitter(seen.append)
    for piece in pieces:
        splitter.feed(piece)
    splitter.flush()
    assert seen == lines


def test_line_splitter_holds_no_endless_line():
    seen: list[bytes] = []
    splitter = LineSplitter(seen.append)
    for _ in range(40):
        splitter.feed(b"x" * 100_000)
    splitter.flush()
    assert b"".join(seen) == b"x" * 4_000_000
    assert len(seen) > 1


def test_nobody_reads_the_output_ends_the_job():
    code = """
    while True:
        print("line")
        time.sleep(0.01)
    """
    with _launched("--grace 0", code) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        popen.stdout.close()
        assert popen.wait(_TIMEOUT_S) == 128 + signal.SIGTERM


# Variables that a process is given.


@pytest.mark.parametrize("streams", [">/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_job_of_a_launcher_that_can_not_write(streams: str, tmp_path: pathlib.Path):
    code = f"""
        print("lost", flush=True); print("lost too", file=sys.stderr)
        pathlib.Path({str(tmp_path)!r}, str(process)).touch()
        sys.exit(3)
    """
    command = ["sh", "-c", f'"$@" {streams}', "sh", *_command("--islands 1", code)]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S)
    assert ended.returncode == 3, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    why = b"  some of the output could not be written: No space left on device"
    assert ended.stderr.splitlines().count(why) == (streams == ">/dev/full"), ended.stderr


def test_slow_reader_of_a_pipe_that_does_not_block_gets_everything():
    lines = 20_000  # more than a pipe holds
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with subprocess.Popen(
        _command("--islands 1", f"for i in range({lines}): print(i, 'x' * 60)"), stdout=theirs
    ) as popen:
        os.close(theirs)
        time.sleep(3)
        with open(ours) as reader:
            text = reader.read()
    assert popen.returncode == 0
    assert text.splitlines() == [f"[island0/0] {i} {'x' * 60}" for i in range(lines)]


def test_job_outlives_its_guardian():
    code = """
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and path.read_bytes().endswith(b"_guardian.py\\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                print("killed", flush=True)
        except OSError:
            pass
    """
    ended = _launch("--islands 1", code)
    assert ended.stdout == "[island0/0] killed\n"
    assert (ended.returncode, ended.stderr) == (0, "")


def test_environment_says_who_and_where_each_process_is():
    code = """
    import json
    print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("JAXHET_", "JAX_P"))}))
    """
    result = _launch("--islands 2 --processes-per-island 2 --devices 3", code)
    assert result.returncode == 0, result.stderr
    told = [json.loads(line.partition("] ")[2]) for line in result.stdout.splitlines()]
    told.sort(key=lambda env: env["JAXHET_PROCESS_ID"])
    islands = [env["JAXHET_ISLAND"] for env in told]
    assert islands == ["island0", "island0", "island1", "island1"]
    shared = [{k: v for k, v in e.items() if k[-3:] != "_ID" and k[-7:] != "_ISLAND"} for e in told]
    assert shared == shared[:1] * 4
    assert shared[0]["JAXHET_NUM_PROCESSES"] == "4"
    assert shared[0]["JAXHET_CPU_DEVICES"] == "3"
    assert shared[0]["JAX_PLATFORMS"] == "cpu"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", shared[0]["JAXHET_COORDINATOR_ADDRESS"])
    assert re.fullmatch(r"[0-9a-f]{64}", shared[0]["JAXHET_JOB_SECRET"])


def test_islands_of_unequal_size_have_their_numbers_of_processes_and_devices():
    code = 'print(os.environ["JAXHET_CPU_DEVICES"], os.environ["JAXHET_NUM_PROCESSES"])'
    result = _launch("--processes-per-island 1,3 --devices 2,4", code)
    assert result.returncode == 0, result.stderr
    others = [f"[island1/{process}] 4 4" for process in (1, 2, 3)]
    assert sorted(result.stdout.splitlines()) == ["[island0/0] 2 4", *others]


@pytest.mark.parametrize(
    ("variable", "default", "own"),
    [
        ("JAX_PLATFORMS", "cpu", "tpu"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", "glibc.malloc.check=0"),
    ],
)
def test_what_the_user_has_set_is_kept(variable: str, default: str, own: str):
    code = f'print(os.environ["{variable}"])'
    assert _launch("--islands 1", code).stdout == f"[island0/0] {default}\n"
    assert _launch("--islands 1", code, **{variable: own}).stdout == f"[island0/0] {own}\n"


# Failure.


def test_first_failure_decides_the_exit_code_and_ends_the_others():
    code = """
    if process == 1:
        sys.exit(7)
    time.sleep(1000)
    """
    result = _launch("--grace 0.2", code)
    assert result.returncode == 7
    assert result.stderr.splitlines()[:2] == [
        "jaxhet launch: failed first: process 1 (island1): exit code 7",
        "  process 0 (island0): killed by SIGTERM (the launcher sent SIGTERM)",
    ]


def test_signal_that_killed_a_process_is_named_and_the_others_are_quoted():
    code = """
    if process == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    print("noise before", file=sys.stderr)
    print("jaxhet.PeerError: process 0 is gone; start anew", file=sys.stderr)
    print("noise after", file=sys.stderr)
    sys.exit(1)
    """
    result = _launch("", code)
    assert result.returncode == 128 + signal.SIGKILL
    assert "failed first: process 0 (island0): killed by SIGKILL\n" in result.stderr
    quoted = "it said: jaxhet.PeerError: process 0 is gone; start anew\n"
    assert f"  process 1 (island1): exit code 1; {quoted}" in result.stderr
    assert re.search(r"the first failure was \d+\.\d s after the start", result.stderr)


@pytest.mark.parametrize(
    ("named", "ends", "first"), [(1, 3, 1), (1, 0, 0), (7, 3, 0)], ids=["it", "well", "unknown"]
)
def test_process_that_the_first_to_end_names_failed_first(named: int, ends: int, first: int):
    code = f"""
    if process == 0:
        words = "process {named} (island1, pid 7 on vm) has left the job"
        sys.exit("jaxhet.PeerError: [rank 0/2 cpu0] exchange 0 (jit(f)): " + words)
    time.sleep(1)
    sys.exit({ends})
    """
    ended = _launch("--islands 2", code)
    assert f"failed first: process {first} (island{first})" in ended.stderr
    assert ended.returncode == (ends if first else 1)


def test_error_that_jax_wraps_is_quoted_from_its_name():
    code = 'sys.exit("JaxRuntimeError: INTERNAL: jaxhet._errors.DeadlineError: too late")'
    result = _launch("--islands 1", code)
    assert "it said: jaxhet._errors.DeadlineError: too late" in result.stderr


_HIDES_FRAMES = {
    "JAX": "import jax; jax.jit(lambda: 1 // 0)()",
    "Grain": """
from grain._src.core import traceback_util
traceback_util.run_with_traceback_filter(lambda: 1 // 0)()
""",
}


@pytest.mark.parametrize("library", _HIDES_FRAMES)
def test_error_is_quoted_without_the_note_of_the_library_that_hides_frames(library: str):
    result = _launch("--islands 1", _HIDES_FRAMES[library], JAX_PLATFORMS="cpu")
    assert f"For simplicity, {library} has removed" in result.stderr
    assert "it said: ZeroDivisionError: integer division or modulo by zero" in result.stderr


def test_others_get_the_grace_time_to_end_by_themselves():
    code = """
    if process == 0:
        sys.exit(3)
    time.sleep(1)
    print("reported")
    """
    result = _launch("--grace 30", code)
    assert result.returncode == 3
    assert "[island1/1] reported" in result.stdout
    assert "process 1 (island1): exit code 0\n" in result.stderr


# The launcher with a default of --grace that tests can wait for.
_SHORT_GRACE = "import jaxhet.cli.launch as l; l.DEFAULT_GRACE_S = 0.5; import jaxhet.cli as c"


def test_process_that_knows_of_the_failure_has_all_the_time_that_it_needs():
    code = """
    from jaxhet._launch import told
    if process == 2:
        sys.exit(3)
    sys.stderr.write("10 %")
    sys.stderr.flush()
    if process == 1:
        told.tell()
    time.sleep(3)
    print("uploaded")
    """
    launched = _command("--islands 3", code)
    launched[1:3] = ["-c", f"{_SHORT_GRACE}; c.main()"]
    result = subprocess.run(
        launched, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert result.returncode == 3
    assert result.stdout == "[island1/1] uploaded\n"
    assert "still waiting for process 1 (island1): the program there knows" in result.stderr
    assert "process 0 (island0): killed by SIGTERM (the launcher sent SIGTERM)" in result.stderr
    assert "process 1 (island1): exit code 0\n" in result.stderr
    assert "[island1/1] 10 %\n" in result.stderr


def test_signal_that_is_not_heeded_ends_the_job_and_its_number_is_the_exit_code():
    code = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready")
    time.sleep(1000)
    """
    with _launched("--grace 1.5 --islands 1", code) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        popen.send_signal(signal.SIGTERM)
        _out, err = popen.communicate(timeout=_TIMEOUT_S)
    assert "killed by SIGKILL (the launcher sent SIGKILL)" in err
    assert popen.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_passed_on_and_the_processes_decide(number: signal.Signals):
    code = f"""
    def handle(number, frame):
        print("got", number)
        sys.exit(0)
    signal.signal({int(number)}, handle)
    print("ready")
    while True:
        time.sleep(0.1)
    """
    with _launched("", code) as popen:
        assert popen.stdout is not None
        for _ in range(2):
            assert popen.stdout.readline().endswith("ready\n")
        popen.send_signal(number)
        out, _err = popen.communicate(timeout=_TIMEOUT_S)
    assert sorted(out.splitlines()) == [f"[island{i}/{i}] got {int(number)}" for i in range(2)]
    assert popen.returncode == 0


# Nothing is left behind.

_FAMILY = '''
folder = pathlib.Path({folder!r})
ignores_sigterm = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""
child = subprocess.Popen([sys.executable, "-c", ignores_sigterm], stdout=subprocess.PIPE)
child.stdout.readline()
(folder / f"child{{process}}").write_text(str(child.pid))
(folder / f"process{{process}}").write_text(str(os.getpid()))
'''


def test_grandchildren_end_with_their_process(tmp_path: pathlib.Path):
    result = _launch("", _FAMILY.format(folder=str(tmp_path)) + 'print("done")')
    assert result.returncode == 0, result.stderr
    assert len(_pids(tmp_path)) == 4
    assert not any(is_running(pid) for pid in _pids(tmp_path))


def test_nothing_survives_the_sigkill_of_the_launcher(tmp_path: pathlib.Path):
    code = _FAMILY.format(folder=str(tmp_path)) + "time.sleep(1000)"
    with _launched("", code) as popen:
        wait_until(lambda: len(list(tmp_path.glob("process*"))) == 2, _TIMEOUT_S)
        popen.kill()
        wait_until(lambda: not any(is_running(pid) for pid in _pids(tmp_path)), _TIMEOUT_S)


def test_no_process_of_the_launcher_is_left(tmp_path: pathlib.Path):
    marker = str(tmp_path)  # in the environment of all that the launcher starts
    assert _launch("", "sys.exit(process)", MARKER=marker).returncode == 1
    left = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                left.append(path)
    assert not left


# Bad input, in words.


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = _launch(f"--port {port}", "pass")
    assert result.returncode == 2
    assert result.stderr.startswith(f"jaxhet.UsageError: port {port} cannot be bound")
    assert "choose another one with --port" in result.stderr


def test_held_port_is_given_to_nobody_else_but_the_coordinator():
    with launch.hold_port(0) as held:
        address = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address):
            pass


def test_command_that_does_not_exist():
    with pytest.raises(UsageError, match="no command 'no-such-program'; name a program"):
        launch.launch(["no-such-program"], launch.Options())


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a", "b", "c")])
def test_island_names_that_do_not_fit(names: tuple[str, ...]):
    with pytest.raises(UsageError, match="does not name 2 islands; give as many different"):
        launch.island_names(launch.Options(islands=2, island_names=names))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (launch.Options(islands=2, processes_per_island=(1, 2, 3)), "--processes-per-island 1,2,3"),
        (launch.Options(islands=3, devices=(2, 4)), "--devices 2,4"),
    ],
)
def test_sizes_that_do_not_fit(options: launch.Options, flag: str):
    words = f"{flag} does not fit {options.islands} islands; give one number for all, or as many as"
    with pytest.raises(UsageError, match=words):
        launch.launch([sys.executable], options)


def test_option_value_that_is_not_valid():
    result = _launch("--devices 2,0", "pass")
    assert result.returncode == 2
    assert "'2,0' is not a number above 0" in result.stderr


def test_bad_option_in_the_environment_is_refused_before_anything_starts():
    result = _launch("", 'print("started")', JAXHET_CONNECT_TIMEOUT_S="soon")
    assert result.returncode == 2
    assert "jaxhet.UsageError: JAXHET_CONNECT_TIMEOUT_S='soon'" in result.stderr
    assert "started" not in result.stdout
