"""Compressed exchanges over pretended islands against the reference, bit for bit.

A process of its own: prints a line of JSON for each case: its name, and what differed.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxhet.compiler import Options, cpu_form
from tests.python.compiler.one_process import ISLANDS, World, mesh
from tests.support.microscaling import decoded, drawn, same_bits, summed

CODECS = ("bf16", "mxfp8", "mxint8", "mxint4")
ROWS, COLUMNS = 1000, 323  # for each rank: 1,000 arrays, above 1 MiB together; odd
FORMS = {"cpu": False, "gpu": True}

Floats = np.ndarray[Any, Any]


def run(world: World, f: Callable[..., Any], x: Floats, islands: str, options: Options, form: str):
    """The results on each device, [devices, ...], and the lines of the plans."""
    world.plans.clear()
    spec = P(("x", "y"))
    g = jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
    with world.compiled_as(ISLANDS[islands], options, FORMS[form]):
        results = jax.block_until_ready(jax.jit(g)(x))
    results = jax.tree.map(lambda y: np.asarray(y).reshape(4, -1, *y.shape[1:]), results)
    return results, [e.line for plan in world.plans for e in plan.exchanges]


def programs(x: jax.Array) -> Any:
    """Over x: each collective that is compressed; x is [rows, columns] on each device."""
    flat = x.reshape(-1)
    return (
        lax.ppermute(flat, "x", [(0, 1), (1, 0)]),
        lax.all_gather(flat, "x"),
        lax.psum(flat, "x"),
        lax.psum_scatter(flat, "x", tiled=True),
        lax.psum(jnp.concatenate([flat, -flat]).astype(jnp.bfloat16), "x"),
    )


def expected(x: Floats, codec: str) -> Any:
    """The results of `programs` on each device; x is [devices, elements]."""
    other = [2, 3, 0, 1]
    gathered = [np.stack([decoded(x[i], codec) for i in sorted((d, other[d]))]) for d in range(4)]
    halves = x.reshape(4, 2, -1)  # each is encoded for itself
    small = np.concatenate([x, -x], 1).astype(jnp.bfloat16)
    pairs = [sorted((d, other[d])) for d in range(4)]
    is_16_bits = codec == "bf16"  # operands of 16 bits travel as they are
    with np.errstate(invalid="ignore", over="ignore"):
        return (
            [decoded(x[other[d]], codec) for d in range(4)],
            gathered,
            [summed([x[a], x[b]], codec) for a, b in pairs],
            [
                summed([halves[a][d // 2], halves[b][d // 2]], codec)
                for d, (a, b) in enumerate(pairs)
            ],
            None
            if is_16_bits
            else [summed([small[a], small[b]], codec, jnp.bfloat16) for a, b in pairs],
        )


def check(world: World, codec: str, form: str) -> list[str]:
    x = np.concatenate([drawn(seed, (ROWS, COLUMNS)) for seed in range(4)])
    options = Options(wire=(("x", codec),))
    results, lines = run(world, programs, x, "2+2", options, form)
    failures = []
    for number, rows in enumerate(expected(x.reshape(4, -1), codec)):
        for device, row in enumerate([] if rows is None else rows):
            found = results[number][device].reshape(np.shape(row))
            if not same_bits(found, np.asarray(row)):
                bad = np.flatnonzero(found.view(np.uint8) != np.asarray(row).view(np.uint8))
                failures.append(f"result {number} of device {device}: {len(bad)} bytes {bad[:3]}")
    if form == "cpu" and sum(f" {codec}" in line for line in lines) < 4:
        failures.append(f"plan: {lines}")
    return failures


def check_groups(world: World, codec: str, form: str) -> list[str]:
    """Sums over both axes: inside islands first; over groups of several islands; unequal groups."""
    values = np.random.default_rng(7).integers(-40, 40, (4, 600, 500)).astype(np.float32)
    failures = []
    each = [[0], [1], [2], [3]]
    for islands, groups in (("2+2", [[0, 1], [2, 3]]), ("each", each), ("1+1+2", each)):
        f = lambda x: lax.psum(x, ("x", "y"))  # noqa: E731
        options = Options(wire=(("", codec),))
        (found, _) = run(world, f, values.reshape(-1, 500), islands, options, form)
        half = values.size // 8
        rows = [values[g].sum(0).reshape(-1) for g in groups]
        shards = len(groups[0])
        parts = [[r.reshape(shards, -1)[s] for r in rows] for s in range(shards)]
        want = np.concatenate([summed(part, codec) for part in parts])
        assert half
        for device in range(4):
            if not same_bits(found[device].reshape(-1), want):
                failures.append(f"{islands}: device {device}")
    return failures


def check_untouched(world: World, form: str) -> list[str]:
    """Integers, other reducers, other types and small arrays have the plan that they had before."""

    def f(x: jax.Array) -> Any:
        return (
            lax.psum(x.astype(jnp.int32), "x"),
            lax.pmax(x, "x"),
            lax.psum(x[:10] * 2, "x"),
            lax.psum(x.astype(jnp.float64), "x"),
            lax.psum(x, "y"),
            lax.all_gather(x > 0, "x"),
            lax.all_to_all(x[:, :320] + 1, "x", 0, 0, tiled=True),
        )

    x = np.concatenate([drawn(seed, (ROWS, COLUMNS)) for seed in range(4)])
    x = np.nan_to_num(x, posinf=1, neginf=1)
    plain, before = run(world, f, x, "2+2", Options(), form)
    coded, after = run(world, f, x, "2+2", Options(wire=(("x", "mxint8"),)), form)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(plain, coded, strict=True))
    return (
        [] if same and before == after else ["results differ"] * (not same) + [f"{before} {after}"]
    )


def check_together(world: World) -> list[str]:
    """Sums that are one exchange without a codec are two with it: the small ones stay exact."""

    def f(x: jax.Array) -> Any:
        return lax.psum((x, x[:10] * 3, x * 2), "x")

    x = np.random.default_rng(3).standard_normal((4 * 600, 500)).astype(np.float32)
    failures = []
    for islands in ("2+2", "each"):
        (exact, *_), plain = run(world, lambda x: (f(x)[1],), x, islands, Options(), "cpu")
        options = Options(wire=(("x", "mxint8"),))
        (_, small, _), lines = run(world, f, x, islands, options, "cpu")
        if small.tobytes() != exact.tobytes():
            failures.append(f"{islands}: the small sum is not exact")
        coded = sum(" of 3 mxint8/32 u8[" in line for line in lines)
        if [len(plain), len(lines), coded] != [1, 2, 1]:
            failures.append(f"{islands}: {lines}")
    return failures


def check_overlap(world: World) -> list[str]:
    """Sums of many bytes are several exchanges, which start before others end; the same bits."""

    def f(x: jax.Array) -> Any:
        return lax.psum((x, x[:10] * 3, x * 2, x * 5), "x")

    x = np.random.default_rng(3).standard_normal((4 * 600, 500)).astype(np.float32)
    options, failures = Options(wire=(("x", "mxint8"),)), []
    for islands in ("2+2", "each"):
        one, _ = run(world, f, x, islands, options, "cpu")
        with mock.patch.object(cpu_form, "_MOST_ENCODED_BYTES", 1 << 20):
            several, lines = run(world, f, x, islands, options, "cpu")
            spec, scaled = P(("x", "y")), lambda x: f(x * 7)  # not the program before
            g = jax.shard_map(scaled, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
            with world.compiled_as(ISLANDS[islands], options):
                text = jax.jit(g).lower(x).compile().as_text() or ""
        if any(a.tobytes() != b.tobytes() for a, b in zip(one, several, strict=True)):
            failures.append(f"{islands}: results differ")
        schedule = text[text.index("ENTRY") :].splitlines()
        starts = [n for n, line in enumerate(schedule) if "jaxhet_exchange" in line]
        if len(starts) != len(lines) or len(starts) < 3:
            failures.append(f"{islands}: {lines}")
        names = [schedule[n].split()[0] for n in starts]
        for n in starts:
            if "control-predecessors" in schedule[n]:
                failures.append(f"{islands}: {schedule[n]}")
        between = schedule[starts[0] + 1 : starts[-1] + 1]
        used = [line for line in between if "fusion(" in line and names[0] in line]
        if used:
            failures.append(f"{islands}: {used}")
    return failures


def check_off(world: World) -> list[str]:
    """A program that no codec concerns is compiled to the text that it has without the option."""
    mapped = jax.shard_map(
        programs, mesh=mesh(), in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False
    )
    texts = {}
    x = jax.ShapeDtypeStruct((4 * ROWS, COLUMNS), jnp.float32)
    for axis in ("", "y", "x"):  # over y nothing crosses
        options = Options(wire=((axis, "mxint8"),) if axis else ())
        with world.compiled_as(ISLANDS["2+2"], options):
            texts[axis] = jax.jit(mapped).lower(x).compile().as_text()
    failures = [] if texts[""] == texts["y"] else ["texts differ"]
    return failures + (["the codec changes nothing"] if texts["x"] == texts[""] else [])


def check_axes(world: World) -> list[str]:
    """The codec of each exchange by its axes, and the islands."""

    def f(x: jax.Array) -> Any:
        return [lax.psum(x * k, axes) for k, axes in ((2, "x"), (3, "y"), (5, ("x", "y")))]

    cases = [  # islands, wire, codecs of the sums over x, y and both
        ("2+2", {"x": "mxint8"}, ["mxint8", "mxint8"]),  # over y nothing crosses
        ("2+2", {"y": "mxint8"}, ["", ""]),
        ("2+2", {"y": "bf16", "": "mxfp8"}, ["mxfp8", "mxfp8"]),
        ("each", {"x": "mxint8"}, ["mxint8", "", ""]),
        ("each", {"x": "mxint8", "y": "mxint8"}, ["mxint8"] * 3),
        ("each", {"x": "mxint8", "": "bf16"}, ["mxint8", "bf16", ""]),
    ]
    x = np.zeros((4 * 600, 500), np.float32)
    failures = []
    for islands, wire, codecs in cases:
        (_, lines) = run(world, f, x, islands, Options(wire=tuple(wire.items())), "cpu")
        found = {}
        for line in lines:
            codec = re.search(r" (bf16|mx\w+/32) ", line)
            found[line.partition("@")[2]] = codec[1].removesuffix("/32") if codec else ""
        if sorted(found.values()) != sorted(codecs):
            failures.append(f"{islands} {wire}: {lines}")
    try:
        run(world, f, x, "2+2", Options(wire=(("z", "bf16"),), needed_axes=("z",)), "cpu")
    except jax.errors.JaxRuntimeError as error:
        if "no mesh axis 'z', which the option wire" not in str(error):
            failures.append(str(error))
    else:
        failures.append("an unknown axis is no error")
    return failures


def main() -> None:
    world = World.make()
    print(json.dumps(("axes", check_axes(world))), flush=True)
    print(json.dumps(("together", check_together(world))), flush=True)
    print(json.dumps(("overlap", check_overlap(world))), flush=True)
    print(json.dumps(("off", check_off(world))), flush=True)
    for form in FORMS:
        # The arithmetic of a codec is the same in both forms.
        for codec in CODECS if form == "cpu" else ("bf16", "mxint4"):
            print(json.dumps((f"{codec} {form}", check(world, codec, form))), flush=True)
            print(
                json.dumps((f"{codec} groups {form}", check_groups(world, codec, form))), flush=True
            )
        print(json.dumps((f"untouched {form}", check_untouched(world, form))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
