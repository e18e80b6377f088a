"""Do programs that know nothing of jaxhet train over two islands as in one world?

    python -m benchmarks.gpu_programs [--platform cpu] [--programs llama,nnx,lora] [--steps 20]

Each program of benchmarks/unmodified.py runs in plain JAX with two processes (NCCL; Gloo on CPU),
and as two islands by `jaxhet run`. The table has the largest relative difference of a loss, and the
time of a step.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import gpus, tables
from benchmarks.unmodified import PROGRAMS
from jaxhet.testing import free_port

_TIMEOUT_S = 300


def _over_islands(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    jaxhet = [sys.executable, "-m", "jaxhet.cli"]
    launch = [*jaxhet, "launch", "--islands", "2", "--devices", "1", "--", *jaxhet, "run", "--"]
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


def main() -> None:
    """Runs the programs and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, with commas")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    env = {**os.environ, "JAX_PLATFORMS": args.platform}
    tiny = ["--tiny"] if args.platform == "cpu" else []
    rows = []
    for program in args.programs.split(","):
        command = [sys.executable, "-m", "benchmarks.unmodified", program]
        command += ["--steps", str(args.steps), *tiny]
        world, islands = _in_one_world(command, env), _over_islands(command, env)
        pairs = zip(islands["losses"], world["losses"], strict=True)
        difference = max(abs(mine - other) / abs(other) for mine, other in pairs)
        rows.append(
            (
                program,
                f"{world['losses'][-1]:.4f}",
                f"{difference:.1e}",
                f"{islands['step_s'] * 1e3:.1f}",
                f"{world['step_s'] * 1e3:.1f}",
                f"{world['step_s'] / islands['step_s']:.2f}",
            )
        )
    headings = ("program", "last loss", "difference", "islands, ms", "one world, ms", "ratio")
    print(tables.markdown(headings, rows), tables.made_at(), sep="\n")


if __name__ == "__main__":
    main()
