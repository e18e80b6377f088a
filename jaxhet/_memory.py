"""The C library's memory allocator, set up for large buffers that come and go every step."""

import ctypes

# Numbers of mallopt(3), glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets freed memory stay with the process, to be used again without page faults.

    By default glibc maps every large buffer anew and returns it when it is freed; the page faults
    take longer than an exchange of 64 MiB through shared memory (docs/benchmarks/results.md).

    Returns:
      Whether the C library took the setting; others than glibc have none.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
