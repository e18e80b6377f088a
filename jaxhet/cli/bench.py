"""`jaxhet bench`: how fast the collectives of a job are, and whether they are right."""

import dataclasses
import pathlib
from collections.abc import Sequence

from jaxhet._errors import UsageError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `jaxhet bench`; `jaxhet bench --help` explains each."""

    collectives: str = "all"
    sizes: str = "1K,64K,1M,16M"
    dtypes: str = "float32,bfloat16"
    iterations: int = 20
    warmup: int = 5
    json: pathlib.Path | None = None


def bench(options: Options) -> int:
    """Takes part in the job; process 0 prints. Returns 0 if all ran and was right, else 1.

    Raises:
      UsageError: an option is not valid, or there is no job.
    """
    from jaxhet.bench import COLLECTIVES, DTYPES, Case  # and with them JAX

    collectives = _chosen("--collectives", options.collectives, COLLECTIVES)
    dtypes = _chosen("--dtypes", options.dtypes, DTYPES)
    sizes = _sizes(options.sizes)
    cases = [Case(c, size, 0, dtype) for c in collectives for dtype in dtypes for size in sizes]
    import jax

    import jaxhet
    from jaxhet.bench import report

    if {"int64", "uint64", "float64", "complex128"}.intersection(dtypes):
        jax.config.update("jax_enable_x64", True)
    jaxhet.initialize()
    is_first = jax.process_index() == 0
    rows = report.run(
        cases,
        options.iterations,
        options.warmup,
        lambda text: print(text, flush=True) if is_first else None,
    )
    if options.json is not None and is_first:
        try:
            report.write(options.json, rows)
        except OSError as error:
            raise UsageError(f"can't write --json {options.json}: {error.strerror}") from None
    jaxhet.shutdown()
    return 0 if all(row.is_good for row in rows) else 1


def _chosen(flag: str, text: str, valid: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(valid)
    for name in names:
        if name not in valid:
            raise UsageError(f"{flag} {name!r} is not valid; it takes all, or {', '.join(valid)}")
    if not names:
        raise UsageError(f"{flag} is empty; it takes all, or {', '.join(valid)}")
    return names


def _sizes(text: str) -> list[int]:
    from jaxhet.bench import parse_size

    try:
        sizes = [parse_size(part.strip()) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--sizes {text!r} is not a list of bytes like 1K,16M,1G")
    return sizes
