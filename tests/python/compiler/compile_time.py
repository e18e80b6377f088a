"""Time of the passes in a vendor's compiler, which compiles a LLaMA's train step without a GPU.

    python -m tests.python.compiler.compile_time [--vendor cuda|rocm] [--config 1b] [--layers 32]
                                                 [--repeats 3] [--scan] [--json FILE]

Each compile is a process of its own; the two kinds take turns. `plain`: the devices are one
island, so that the passes return at once. `bridged`: each device is an island of its own. Both with
the same XLA flags. Times are the medians of the repeats; CPU seconds are of the whole process and
all its threads while it compiles, memory is the process's peak. Before that, JAX traces and lowers
the step (`lower_s`); a digest of its jaxpr takes `digest_s` of this time. The last line is what the
hook costs a module of the same size that has no collective.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

SYSTEMS = ("plain", "bridged")
CPU_BAR, MEMORY_BAR = 1.1, 1.2
_SEQUENCE, _BATCH = 2048, 2


def measure(vendor: str, system: str, args: argparse.Namespace) -> dict[str, float]:
    """Compiles once, in this process."""
    import dataclasses

    from tests.python.compiler.install_plugins import PLUGINS

    sys.path.append(str(PLUGINS))
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxhet._pretended import deviceless
    from jaxhet._traced import jaxprs
    from jaxhet.compiler import Job, Options, Plan, decompose
    from models.configs import CONFIGS
    from models.train import Schedule, Trainer

    passes = {"pre_s": 0.0, "post_s": 0.0, "modules": 0.0, "hook_s": 0.0, "digest_s": 0.0}
    describe = jaxprs.describe

    def timed_describe(*program: Any) -> jaxprs.Program:
        start = time.perf_counter()
        result = describe(*program)
        passes["digest_s"] += time.perf_counter() - start
        return result

    jaxprs.describe = timed_describe

    class Compiler(deviceless.Compiler):
        def decompose(self, module: bytes, job: Job, options: Options) -> bytes | None:
            start = time.perf_counter()
            result = super().decompose(module, job, options)
            passes["pre_s"] += time.perf_counter() - start
            passes["modules"] += 1
            # Text of the same length that is no opcode that the hook looks for.
            without = module.replace(b"\x12\x0aall-reduce", b"\x12\x0aall-nothin")
            start = time.perf_counter()
            decompose(without, job, options)
            passes["hook_s"] += time.perf_counter() - start
            return result

        def bridge(self, module: bytes, job: Job) -> tuple[bytes, Plan] | None:
            start = time.perf_counter()
            result = super().bridge(module, job)
            passes["post_s"] += time.perf_counter() - start
            return result

    compiler = Compiler(vendor)  # type: ignore[arg-type]
    devices = compiler.devices(2, 1)
    mesh = Mesh(np.array(devices), ("data",))
    config = dataclasses.replace(CONFIGS[args.config], layers=args.layers, scan=args.scan)
    trainer = Trainer(config, Schedule(1e-3, 10, 0.1, 1.0), mesh)
    start = time.perf_counter()
    lowered = trainer.lower(jax.jit, 2 * _BATCH, _SEQUENCE)
    lower_s = time.perf_counter() - start
    islands = tuple((d,) for d in devices) if system == "bridged" else (tuple(devices),)
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    result = compiler.compile(lowered, islands, Options(), codegen=True)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "lower_s": lower_s,
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_gb": after.ru_maxrss * 1024 / 1e9,
        "exchanges": len(result[1].exchanges) if result else 0,
        **passes,
    }


def main() -> None:
    """Prints a table; exits with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", choices=("cuda", "rocm"), default="cuda")
    parser.add_argument("--config", default="1b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--once", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure(args.vendor, args.once, args)))
        return
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for _ in range(args.repeats):
        for system in SYSTEMS:
            command = [sys.executable, "-m", "tests.python.compiler.compile_time", *sys.argv[1:]]
            output = subprocess.run(
                [*command, "--once", system], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            runs[system].append(json.loads(output.splitlines()[-1]))
    medians = {
        s: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for s, rows in runs.items()
    }
    sys.exit(_report(args, medians))


def _report(args: argparse.Namespace, medians: dict[str, dict[str, float]]) -> int:
    form = "scanned" if args.scan else "unrolled"
    print(f"{args.vendor}, {args.config} of {args.layers} layers, {form}, {args.repeats} repeats")
    columns = ("lower_s", "digest_s", "wall_s", "cpu_s", "pre_s", "post_s", "peak_gb", "exchanges")
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for system, row in medians.items():
        print(f"| {system} | " + " | ".join(f"{row[c]:.3g}" for c in columns) + " |")
    ratios: dict[str, Any] = {
        c: medians["bridged"][c] / medians["plain"][c] for c in ("wall_s", "cpu_s", "peak_gb")
    }
    print(
        "| ratio | " + " | ".join(f"{ratios[c]:.3f}" if c in ratios else "" for c in columns) + " |"
    )
    hook_ms = medians["plain"]["hook_s"] / medians["plain"]["modules"] * 1e3
    print(f"the hook on a module without collectives: {hook_ms:.3f} ms")
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "ratios": ratios, "hook_ms": hook_ms}))
    is_missed = ratios["cpu_s"] > CPU_BAR or ratios["peak_gb"] > MEMORY_BAR
    print(
        f"bars: CPU seconds {CPU_BAR} ×, memory {MEMORY_BAR} ×: {'MISSED' if is_missed else 'met'}"
    )
    return int(is_missed)


if __name__ == "__main__":
    main()
