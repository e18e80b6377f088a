"""`jaxhet bench`: how fast the collectives of a job are, and whether they are right."""

import pathlib
from collections.abc import Sequence
from typing import Annotated

import typer

from jaxhet._errors import UsageError


def bench(
    collectives: Annotated[
        str, typer.Option(metavar="NAME,...", help="collectives: all_reduce, all_gather, …; or all")
    ] = "all",
    sizes: Annotated[
        str, typer.Option(metavar="BYTES,...", help="size of a device's larger buffer; K, M, G")
    ] = "1K,64K,1M,16M",
    dtypes: Annotated[
        str, typer.Option(metavar="NAME,...", help="types: float32, bfloat16, …; or all")
    ] = "float32,bfloat16",
    iterations: Annotated[int, typer.Option(min=1, help="timed calls of each collective")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="untimed calls before the timed ones")] = 5,
    json: Annotated[
        pathlib.Path | None, typer.Option(help="file in which process 0 writes the rows")
    ] = None,
) -> None:
    """Time and check the collectives of a job; every process of the job runs this command.

    Example: jaxhet launch --islands 2 -- jaxhet bench. algbw is bytes / time; busbw is algbw times
    2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all, 1 for
    permute, with n devices. The exit code is 1 if an element was wrong or a case could not run.
    """
    from jaxhet.bench import COLLECTIVES, DTYPES, Case  # and with them JAX

    names = _chosen("--collectives", collectives, COLLECTIVES)
    types = _chosen("--dtypes", dtypes, DTYPES)
    numbers = _sizes(sizes)
    cases = [Case(c, size, 0, dtype) for c in names for dtype in types for size in numbers]
    import jax

    import jaxhet
    from jaxhet.bench import report

    if {"int64", "uint64", "float64", "complex128"}.intersection(types):
        jax.config.update("jax_enable_x64", True)
    jaxhet.initialize()
    is_first = jax.process_index() == 0
    rows = report.run(
        cases,
        iterations,
        warmup,
        lambda text: print(text, flush=True) if is_first else None,
    )
    if json is not None and is_first:
        try:
            report.write(json, rows)
        except OSError as error:
            raise UsageError(f"can't write --json {json}: {error.strerror}") from None
    jaxhet.shutdown()
    raise typer.Exit(0 if all(row.is_good for row in rows) else 1)


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
