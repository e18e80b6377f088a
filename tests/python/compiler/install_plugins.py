"""Puts the CUDA and ROCm compiler plugins where the deviceless tests look for them.

Not into the environment: JAX would try to start them. The packages are those of the extra
`deviceless`, 1.2 GB unpacked.
"""

import pathlib
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[3]
PLUGINS = ROOT / ".cache" / "plugins"


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["optional-dependencies"]["deviceless"]
    partial = PLUGINS.with_name("plugins.partial")
    shutil.rmtree(partial, ignore_errors=True)
    arguments = ["install", "--quiet", "--no-compile", "--no-deps", "--target", str(partial)]
    constraints = ROOT / "constraints.txt"
    if constraints.exists():
        arguments += ["--constraint", str(constraints)]
    subprocess.run([sys.executable, "-m", "pip", *arguments, *packages], check=True)
    shutil.rmtree(PLUGINS, ignore_errors=True)
    partial.rename(PLUGINS)


if __name__ == "__main__":
    main()
