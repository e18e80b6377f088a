"""One process of the collectives benchmark: compiles, checks and times cases; times copies."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import collective_cases
from benchmarks.collectives import Case
from benchmarks.on_devices import facts
from jaxhet import testing

_COPIES = 5


_prepared = functools.cache(collective_cases.prepare)


def _failure(case: Case) -> str:
    """Prepares a case; returns its problem, or nothing."""
    try:
        wrong = _prepared(case).num_wrong
    except Exception as error:  # one case must not hide the others
        return f"{type(error).__name__}: {error}"
    return f"{case}: {wrong} wrong numbers on local devices" if wrong else ""


def _times(case: Case, iterations: int) -> list[float]:
    """Seconds of each collective: of a call, or of a link of the chain."""
    # A single iteration is long: the first call's overhead is small beside it.
    return _prepared(case).times(iterations, warmup=int(iterations > 1))


def _copies(num_bytes: int) -> dict[str, float]:
    """GB/s between the memory of this process's devices, all at once, and pinned host memory."""
    devices = jax.local_devices()
    here = [SingleDeviceSharding(d, memory_kind="pinned_host") for d in devices]
    there = [SingleDeviceSharding(d) for d in devices]
    given = [jax.jit(lambda: jnp.ones(num_bytes // 4), out_shardings=s)() for s in there]
    rates = {}
    for name, targets in (("to_host", here), ("to_device", there)):
        # A program's copy: XLA hands it to the driver as it is.
        copies = [jax.jit(lambda x, s=s: jax.device_put(x, s), out_shardings=s) for s in targets]
        copied = [copy(x) for copy, x in zip(copies, given, strict=True)]
        jax.block_until_ready(copied)
        seconds = []
        for _ in range(_COPIES):
            start = time.perf_counter()
            jax.block_until_ready([copy(x) for copy, x in zip(copies, given, strict=True)])
            seconds.append(time.perf_counter() - start)
        given = copied
        rates[name] = num_bytes / float(np.median(seconds)) / 1e9
    return rates


def _answer(request: dict[str, Any]) -> Any:
    match request:
        case {"prepare": cases}:
            return [_failure(case) for case in cases]
        case {"time": case, "iterations": iterations}:
            return _times(case, iterations)
        case {"copies": num_bytes}:
            return _copies(num_bytes)
    return facts()


if __name__ == "__main__":
    testing.serve(_answer)
