"""Set-up of the C library's allocator for large buffers that each step allocates and frees."""

import ctypes

# Numbers of mallopt(3), glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes the process keep freed memory, so that its reuse causes no page faults.

    By default glibc maps every large buffer anew and returns it when it is freed; the page faults
    take longer than an exchange of 64 MiB through shared memory (docs/benchmarks/results.md).

    Returns:
      Whether the C library accepted the setting; only glibc has it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
