"""What does it cost to hide a host's other GPUs from a process? Copies by the CUDA driver alone.

    python -m benchmarks.gpu_pull [--mib 512]

Two processes with a GPU each map each other's memory, as jaxhet does, and copy at the same time:
out of the other's memory (pull), into it (push), at home, and a pull beside a copy at home. Once
each process sees both GPUs, its own first, and once only its own. Medians of 10.
"""

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks import tables
from tests.support import gpus

_TURNS = 10
_POSIX_FD, _ON_DEVICE, _READ_WRITE, _PINNED = 1, 1, 3, 1  # CU_MEM_...
_u64, _size, _pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", _pointer),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Gpu:
    """The first GPU that this process sees: three blocks there, and those of the other process."""

    def __init__(self, num_bytes: int, peer: socket.socket):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._num_bytes, self._peer = num_bytes, peer
        self._call("cuInit", 0)
        context = _pointer()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        allocation = _u64()
        properties = _Properties(_PINNED, _POSIX_FD, _Location(_ON_DEVICE, 0), None, 0, 1, 0)
        self._call(
            "cuMemCreate",
            ctypes.byref(allocation),
            _size(3 * num_bytes),
            ctypes.byref(properties),
            _u64(0),
        )
        self._own, self._theirs = self._map(allocation), self._map(self._swap(allocation))
        self._streams = [_pointer(), _pointer()]
        for stream in self._streams:
            self._call("cuStreamCreate", ctypes.byref(stream), 1)

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name} says {result}")

    def _swap(self, allocation: ctypes.c_uint64) -> ctypes.c_uint64:
        """The other process's allocation for this one's."""
        fd, theirs = ctypes.c_int(), _u64()
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), allocation, _POSIX_FD, _u64(0))
        socket.send_fds(self._peer, [b"."], [fd.value])
        _, (received,), _, _ = socket.recv_fds(self._peer, 1, 1)
        self._call(
            "cuMemImportFromShareableHandle", ctypes.byref(theirs), _pointer(received), _POSIX_FD
        )
        return theirs

    def _map(self, allocation: ctypes.c_uint64) -> int:
        address, num_bytes = _u64(), _size(3 * self._num_bytes)
        access = _Access(_Location(_ON_DEVICE, 0), _READ_WRITE)
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), num_bytes, _size(0), _u64(0), _u64(0)
        )
        self._call("cuMemMap", address, num_bytes, _size(0), allocation, _u64(0))
        self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), _size(1))
        return address.value

    def _copy(self, to: int, source: int, stream: int) -> None:
        self._call(
            "cuMemcpyAsync", _u64(to), _u64(source), _size(self._num_bytes), self._streams[stream]
        )

    def pull(self) -> None:
        """Block 2 of the other's to block 0."""
        self._copy(self._own, self._theirs + 2 * self._num_bytes, 0)

    def push(self) -> None:
        """Block 2 to block 0 of the other's."""
        self._copy(self._theirs, self._own + 2 * self._num_bytes, 0)

    def at_home(self) -> None:
        """Block 2 to block 1."""
        self._copy(self._own + self._num_bytes, self._own + 2 * self._num_bytes, 1)

    def microseconds(self, *works: Callable[[], None]) -> float:
        """Of all works together, both processes at the same time; the median."""
        times = []
        for _ in range(_TURNS):
            self._meet()
            begin = time.perf_counter()
            for work in works:
                work()
            for stream in self._streams:
                self._call("cuStreamSynchronize", stream)
            times.append(time.perf_counter() - begin)
        self._meet()
        return statistics.median(times) * 1e6

    def _meet(self) -> None:
        self._peer.send(b".")
        self._peer.recv(1)


def _worker(
    visible: str,
    num_bytes: int,
    peer: socket.socket,
    answer: multiprocessing.connection.Connection,
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    gpu = _Gpu(num_bytes, peer)
    pairs = [(gpu.pull,), (gpu.push,), (gpu.at_home,), (gpu.at_home, gpu.pull)]
    answer.send([gpu.microseconds(*works) for works in pairs])


def _measure(visible: tuple[str, str], num_bytes: int) -> list[float]:
    """Microseconds of each measurement, those of the slower process."""
    spawn = multiprocessing.get_context("spawn")
    sockets = socket.socketpair()
    results, workers = [], []
    for names, own in zip(visible, sockets, strict=True):
        result, answer = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=_worker, args=(names, num_bytes, own, answer))
        worker.start()
        answer.close()
        results.append(result)
        workers.append(worker)
    for own in sockets:
        own.close()
    slower = [max(times) for times in zip(*(r.recv() for r in results), strict=True)]
    for worker in workers:
        worker.join()
    return slower


def main() -> int:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="of each copy")
    num_bytes = parser.parse_args().mib << 20
    if reason := gpus.why_fewer_than(2):
        parser.error(reason)
    rows = []
    for name, visible in (("both GPUs", ("0,1", "1,0")), ("its own", ("0", "1"))):
        pull, push, home, both = _measure(visible, num_bytes)
        rates = (f"{num_bytes / microseconds / 1e3:.0f}" for microseconds in (pull, push))
        rows.append((name, *rates, f"{home:.0f}", f"{pull:.0f}", f"{both:.0f}"))
    headings = ("a process sees", "pull, GB/s", "push, GB/s", "at home, us", "pull, us", "both, us")
    print(tables.markdown(headings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
