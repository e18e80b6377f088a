"""Jobs on hosts with several network interfaces: network namespaces stand for the hosts."""

import re
import subprocess
import time

import pytest
from two_islands import SET_UP

from tests.support import hosts
from tests.support.hosts import Hosts
from tests.support.scripts import Ended

pytestmark = [
    pytest.mark.slow,  # JAX starts on each host
    pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable() or "available"),
]

# Sums rows of integers in f32 again and again, exact in any order, and checks every element.
_PROGRAM = """
rows = np.arange(mesh.size * int(os.environ["ELEMENTS"]), dtype=np.float32).reshape(mesh.size, -1)
rows %= 1009
x, add = put(rows), over_islands(psum)
expected = rows.sum(0)[None]
for i in range(int(os.environ["ROUNDS"]) + 1):
    start = time.monotonic()
    total = np.asarray(add(x).addressable_shards[0].data)
    seconds = time.monotonic() - start
    assert np.array_equal(total, expected), f"round {i} is wrong"
    print("round", i, f"{seconds:.4f}", flush=True)
print("right", {path.transport for path in jaxhet.paths()}, flush=True)
jaxhet.shutdown()
"""
_MBIT_S = 160
_ELEMENTS = 1 << 21  # 8 MiB in each direction: 0.42 s at this rate
_LEFT = re.compile(
    r"jaxhet: \[process \d/2\] process \d \(.*\): socket leaves eth1 \(10\.77\.1\.\d to "
)


def _check(ended: list[Ended]) -> None:
    for one in ended:
        assert one.code == 0, one.text
        assert "right {'socket'}" in one.text, one.text


def _seconds(ended: Ended) -> list[float]:
    """Times of the rounds after the first, which compiles."""
    return [float(s) for s in re.findall(r"^round [1-9]\d* (\S+)$", ended.text, re.MULTILINE)]


def _read_until(process: "subprocess.Popen[str]", start: str) -> None:
    """Reads the output of a process up to a line that starts so."""
    assert process.stdout is not None
    lines = []
    while not lines or not lines[-1].startswith(start):
        lines.append(process.stdout.readline())
        assert lines[-1], lines


@pytest.mark.parametrize(
    ("way", "encryption"),
    [("down", "off"), ("unplugged", "off"), ("down", "full")],
    ids=["down", "unplugged", "sealed"],
)
def test_job_goes_on_when_an_interface_fails(way: str, encryption: str) -> None:
    env = {"ELEMENTS": str(_ELEMENTS), "ROUNDS": "12", "JAXHET_ENCRYPTION": encryption}
    with Hosts(2, 2, _MBIT_S) as net:
        processes = net.start(SET_UP + _PROGRAM, net.job(**env, JAXHET_PEER_TIMEOUT_S="3"))
        _read_until(processes[0], "round 3 ")
        (net.take_down if way == "down" else net.unplug)(1, 1)
        failed_at = time.monotonic()
        ended = hosts.wait(processes, 150)
        print(f"{way}: the job ended {time.monotonic() - failed_at:.1f} s later")
    _check(ended)
    for one in ended:
        assert len(_LEFT.findall(one.text)) == 1, one.text
        assert "Check that interface, its cable and switch" in one.text
    late = [seconds for one in ended for seconds in _seconds(one) if seconds > 2]
    assert late, "the failure fell between two rounds: it proves nothing"


@pytest.mark.parametrize("names", ["eth1,eth2", "eth1"])
def test_job_ends_in_words_when_all_its_data_interfaces_fail(names: str) -> None:
    env = {"ELEMENTS": str(_ELEMENTS), "ROUNDS": "50", "JAXHET_SOCKET_INTERFACES": names}
    with Hosts(2, 3, _MBIT_S) as net:
        processes = net.start(SET_UP + _PROGRAM, net.job(**env, JAXHET_PEER_TIMEOUT_S="3"))
        _read_until(processes[0], "round 3 ")
        net.take_down(1, 1)
        net.unplug(1, 2)
        failed_at = time.monotonic()
        ended = hosts.wait(processes, 60)
        seconds = time.monotonic() - failed_at
    for one in ended:
        assert one.code != 0, one.text
        assert "no data connection is left; the last was over eth" in one.text, one.text
    print(f"the job ended {seconds:.1f} s later")
    assert seconds < 30
