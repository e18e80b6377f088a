"""Do programs that know nothing of jaxhet train over two islands as in one world?

    python -m benchmarks.gpu_programs [--platform cpu] [--programs llama,nnx,lora] [--steps 20]
                                      [--islands 1] [--turns 3]

Each program of benchmarks/unmodified.py runs in plain JAX with two processes (NCCL; Gloo on CPU),
and by `jaxhet run` as two islands, or as one island of two processes. The jobs take turns. The
table has the largest relative difference of a loss to the one world's, that of one world with other
kernels (the noise), and the median time of a step.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpus, tables
from benchmarks.unmodified import PROGRAMS
from jaxhet.testing import free_port

_TIMEOUT_S = 300
# Flags with which XLA takes other kernels.
_OTHER_KERNELS = {"cuda": "--xla_gpu_autotune_level=0", "cpu": "--xla_cpu_max_isa=AVX"}


def _under_jaxhet(islands: int, command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    jaxhet = [sys.executable, "-m", "jaxhet.cli"]
    shape = ["--islands", str(islands), "--processes-per-island", str(2 // islands)]
    launch = [*jaxhet, "launch", *shape, "--devices", "1", "--", *jaxhet, "run", "--"]
    return _result([subprocess.Popen([*launch, *command], env=env, stdout=subprocess.PIPE)])


def _in_one_world(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    world = ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    names = gpus.visible()[0] or ["0", "1"]
    running = [
        subprocess.Popen(
            [*command, *world, "--process-id", str(process)],
            env={**env, "JAX_NUM_CPU_DEVICES": "1", "CUDA_VISIBLE_DEVICES": name},
            stdout=subprocess.PIPE,
        )
        for process, name in enumerate(names[:2])
    ]
    return _result(running)


def _result(running: Sequence[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The line that process 0 printed, once all have ended."""
    try:
        texts = [process.communicate(timeout=_TIMEOUT_S)[0].decode() for process in running]
    finally:
        for process in running:
            process.kill()
    (line,) = re.findall(r"\{\"losses\".*\}", "\n".join(texts))
    return json.loads(line)


def _difference(losses: Sequence[float], world: Sequence[float]) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(losses, world, strict=True)
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def main() -> None:
    """Runs the programs and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, with commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--islands", type=int, choices=(1, 2), default=2)
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    env = {**os.environ, "JAX_PLATFORMS": args.platform}
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_OTHER_KERNELS[args.platform]}"
    tiny = ["--tiny"] if args.platform == "cpu" else []
    rows = []
    for program in args.programs.split(","):
        command = [sys.executable, "-m", "benchmarks.unmodified", program]
        command += ["--steps", str(args.steps), *tiny]
        turns = [
            (_in_one_world(command, env), _under_jaxhet(args.islands, command, env))
            for _ in range(args.turns)
        ]
        noise = _in_one_world(command, {**env, "XLA_FLAGS": flags})["losses"]
        world, mine = turns[0][0]["losses"], turns[0][1]["losses"]
        plain_s, step_s = (
            statistics.median(t["step_s"] for t in of) for of in zip(*turns, strict=True)
        )
        rows.append(
            (
                program,
                f"{world[-1]:.4f}",
                f"{_difference(mine, world):.1e}",
                f"{_difference(noise, world):.1e}",
                f"{step_s * 1e3:.1f}",
                f"{plain_s * 1e3:.1f}",
                f"{plain_s / step_s:.3f}",
            )
        )
    headings = ("program", "last loss", "difference", "noise", "jaxhet, ms", "plain, ms", "ratio")
    print(tables.markdown(headings, rows), tables.made_at(), sep="\n")


if __name__ == "__main__":
    main()
