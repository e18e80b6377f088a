"""Ranges for profilers: a stand-in for NVIDIA's or AMD's library hears of each exchange."""

import collections
import contextlib
import ctypes
import pathlib
import subprocess

import pytest
from two_islands import run_both

_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static FILE* log_file(void) {
  static FILE* file;
  if (!file) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", getenv("RANGE_LOG"), (int)getpid());
    file = fopen(path, "w");
    setvbuf(file, NULL, _IOLBF, 0);
  }
  return file;
}

unsigned long START(const char* name) {
  static unsigned long last;
  fprintf(log_file(), "start %lu %s\\n", ++last, name);
  return last;
}
void END(unsigned long id) { fprintf(log_file(), "end %lu\\n", id); }
int PUSH(const char* name) { fprintf(log_file(), "push %s\\n", name); return 0; }
int POP(void) { fprintf(log_file(), "pop\\n"); return 0; }
"""
_SCRIPT = """
f = over_islands(psum)
for _ in range(3):
    f(x).block_until_ready()
jaxhet.shutdown()
"""
_LIBRARIES = {
    "libnvtx3interop.so.1": {
        "START": "nvtxRangeStartA",
        "END": "nvtxRangeEnd",
        "PUSH": "nvtxRangePushA",
        "POP": "nvtxRangePop",
    },
    "libroctx64.so.4": {
        "START": "roctxRangeStartA",
        "END": "roctxRangeStop",
        "PUSH": "roctxRangePushA",
        "POP": "roctxRangePop",
    },
}


def _build(name: str, folder: pathlib.Path) -> None:
    """A library of this name that writes its calls to $RANGE_LOG.<pid>."""
    (folder / "ranges.c").write_text(_SOURCE)
    names = [f"-D{macro}={function}" for macro, function in _LIBRARIES[name].items()]
    files = ["-o", str(folder / name), str(folder / "ranges.c")]
    subprocess.run(["cc", "-shared", "-fPIC", *names, *files], check=True)


def _has_nvtx() -> bool:
    for name in ("libnvToolsExt.so.1", "libnvtx3interop.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["found by the loader", "preloaded by a profiler"])
@pytest.mark.parametrize("library", _LIBRARIES)
def test_each_exchange_is_a_range(library: str, how: str, tmp_path: pathlib.Path) -> None:
    is_preloaded = how.startswith("preloaded")
    if library == "libroctx64.so.4" and not is_preloaded and _has_nvtx():
        pytest.skip("this machine has NVIDIA's NVTX, which is taken before AMD's rocTX")
    _build(library, tmp_path)
    place = {"LD_PRELOAD": str(tmp_path / library)} if is_preloaded else {}
    environment = place or {"LD_LIBRARY_PATH": str(tmp_path)}
    environment["RANGE_LOG"] = str(tmp_path / "ranges.log")
    for ended in run_both(_SCRIPT, JAXHET_PROFILER_RANGES="1", **environment):
        assert ended.code == 0, ended.text
    logs = sorted(tmp_path.glob("ranges.log.*"))
    assert len(logs) == 2
    ranks = set()
    for path in logs:
        lines = [line.split(" ", 2) for line in path.read_text().splitlines()]
        started = {line[1]: line[2] for line in lines if line[0] == "start"}
        assert len(started) == 3
        assert [line[1] for line in lines if line[0] == "end"] == list(started)
        (name,) = collections.Counter(started.values())
        rank, _, exchange = name.removeprefix("jaxhet ").partition(": ")
        assert exchange.startswith("exchange 0 (")
        assert "psum" in exchange
        ranks.add(rank)
    assert ranks == {"rank 0", "rank 1"}
