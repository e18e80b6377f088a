"""Machines whose clocks differ: a library in front of libc sets the clock of one process back."""

import pathlib
import re
import subprocess

import pytest

from tests.support.certificates import make_files
from tests.support.scripts import job, run

_LIBRARY = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec* now) {
  int code = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
    now->tv_sec -= atol(getenv("CLOCK_BEHIND_S"));
  }
  return code;
}

int gettimeofday(struct timeval* now, void* zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
"""
_PROGRAM = """
import datetime, jax, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
print("day", datetime.datetime.now(datetime.UTC).date(), flush=True)
jaxhet.initialize()
sharding = NamedSharding(jaxhet.make_mesh({"x": -1}), P("x"))
x = jax.make_array_from_callback((4,), sharding, lambda i: np.arange(4, dtype=np.float32)[i])
print("sum", float(jaxhet.jit(lambda x: x.sum())(x)))
jaxhet.shutdown()
"""
_DAY_S = 86400
_UTC = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@pytest.fixture(scope="module")
def set_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose clock is 40 days behind.

    Only backward: programs wait until a time on the true clock, and one ahead would never come.
    """
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(_LIBRARY)
    files = ["-o", str(folder / "clock.so"), str(folder / "clock.c")]
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *files], check=True)
    return {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_BEHIND_S": str(40 * _DAY_S)}


@pytest.mark.slow  # processes that start anew, with another clock
@pytest.mark.parametrize("behind", [0, 1], ids=["the coordinator's machine", "another machine"])
def test_job_with_its_own_certificates_runs_whatever_clocks_say(
    behind: int, set_back: dict[str, str]
) -> None:
    envs = job()
    envs[behind].update(set_back)
    ended = run(_PROGRAM, *envs, timeout_s=120)
    for each in ended:
        assert (each.code, "sum 6.0" in each.text) == (0, True), each.text
    assert len({re.findall(r"^day (\S+)$", each.text, re.MULTILINE)[0] for each in ended}) == 2


@pytest.mark.parametrize(
    "behind",
    [0, pytest.param(1, marks=pytest.mark.slow)],
    ids=["the coordinator's machine", "another machine"],
)
def test_clock_by_which_given_certificates_are_not_yet_valid_is_named(
    behind: int, set_back: dict[str, str], tmp_path: pathlib.Path
) -> None:
    envs = job(2, **make_files(tmp_path))
    envs[behind].update(set_back)
    for process, ended in enumerate(run(_PROGRAM, *envs, timeout_s=120)):
        assert ended.code == 1, ended.text
        # A process that is told by the coordinator repeats the words of the one that found it.
        owner = r"(process 0 \(.*\)|the coordinator at [\d.:]+)" if behind == 0 else "process 1 "
        assert re.search(
            rf"UsageError: .*do not accept each other's certificates: .* is valid from {_UTC} to"
            rf" {_UTC}, and the clock of .* says {_UTC}; the clock of .* says {_UTC}: it is not yet"
            rf" valid by the clock of {owner}.*\. Set the clock of {owner}",
            ended.text,
        ), (process, ended.text)


@pytest.mark.slow
def test_clock_by_which_given_certificates_have_expired_is_named(
    set_back: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """Certificates of 40 days ago are valid by the clock that is behind, which process 0 has."""
    envs = job(2, **make_files(tmp_path, clock_ahead_days=-40))
    envs[0].update(set_back)
    for process, ended in enumerate(run(_PROGRAM, *envs, timeout_s=120)):
        assert ended.code == 1, ended.text
        assert re.search(
            r"it is no longer valid by the clock of process 1 \(.*\)\. Set the clock of process 1"
            r" \(.*\); if it is right, set the clock of the coordinator at [\d.:]+ and renew the"
            r" certificate",
            ended.text,
        ), (process, ended.text)
