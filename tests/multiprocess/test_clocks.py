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
@pytest.mark.parametrize("late", [0, 1], ids=["the coordinator's machine", "another machine"])
def test_job_with_its_own_certificates_runs_whatever_clocks_say(
    late: int, set_back: dict[str, str]
) -> None:
    envs = job()
    envs[late].update(set_back)
    ended = run(_PROGRAM, *envs, timeout_s=120)
    for each in ended:
        assert (each.code, "sum 6.0" in each.text) == (0, True), each.text
    assert len({re.findall(r"^day (\S+)$", each.text, re.MULTILINE)[0] for each in ended}) == 2


@pytest.mark.parametrize(
    "late",
    [0, pytest.param(1, marks=pytest.mark.slow)],
    ids=["the coordinator's machine", "another machine"],
)
def test_clock_at_which_given_certificates_are_not_valid_is_named(
    late: int, set_back: dict[str, str], tmp_path: pathlib.Path
) -> None:
    envs = job(**make_files(tmp_path))
    envs[late].update(set_back)
    for process, ended in enumerate(run(_PROGRAM, *envs, timeout_s=120)):
        assert ended.code == 1, ended.text
        assert re.search(
            r"UsageError: .*do not accept each other's certificates: .*This machine's clock says"
            r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC",
            ended.text,
        ), (process, ended.text)
        if late == 0 and process == 1:  # the coordinator does not say why it refuses
            assert "its own certificate is valid from 20" in ended.text, ended.text
