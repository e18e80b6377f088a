"""Puts the CUDA and ROCm compiler plugins where the deviceless tests look for them.

Not into the environment: JAX would try to start them. The packages are those of the extra
`deviceless`, 1.2 GB unpacked. pip checks the SHA-256 of each file. A folder for each version of
JAX.
"""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]
_NAME = "plugins" if importlib.metadata.version("jax").startswith("0.11.") else "plugins-next"
PLUGINS = ROOT / ".cache" / _NAME
HASHES = ROOT / "tools" / "hashes" / f"{_NAME}.txt"


def main() -> None:
    partial = PLUGINS.with_name(f"{_NAME}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    arguments = ["install", "--quiet", "--no-compile", "--no-deps", "--target", str(partial)]
    hashed = ["--require-hashes", "--requirement", str(HASHES)]
    subprocess.run([sys.executable, "-m", "pip", *arguments, *hashed], check=True)
    shutil.rmtree(PLUGINS, ignore_errors=True)
    partial.rename(PLUGINS)


if __name__ == "__main__":
    main()
