"""Puts programs that others published, and the packages that they import, into .cache/programs.

Flax's source distribution has examples. The packages are those of the extra `programs` and what
they need besides this environment; 1.6 GB unpacked. TensorFlow reads the examples' data.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib

ROOT = pathlib.Path(__file__).parents[3]
PROGRAMS = ROOT / ".cache" / "programs"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
_PINS = ["--quiet", "--constraint", str(ROOT / "constraints.txt")]


def _pip(*arguments: str) -> None:
    subprocess.run([*_PIP, *arguments], check=True)


def _absent(packages: list[str], folder: pathlib.Path) -> list[str]:
    """The packages and their requirements that this environment lacks, with versions."""
    report = folder / "report.json"
    _pip("install", *_PINS, "--dry-run", "--report", str(report), *packages)
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return [f"{package['name']}=={package['version']}" for package in found]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    partial = PROGRAMS.with_name("programs.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    absent = _absent(project["optional-dependencies"]["programs"], partial)
    target = ["--no-compile", "--no-deps", "--target", str(partial / "packages")]
    _pip("install", *_PINS, *target, *absent)
    source = ["--no-deps", "--no-binary=flax", "--no-build-isolation", "--dest", str(partial)]
    _pip("download", *_PINS, *source, "flax")
    (archive,) = partial.glob("flax-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(partial, filter="data")
    archive.unlink()
    PROGRAMS.mkdir(exist_ok=True)
    for path in partial.iterdir():  # checkouts that somebody has put there stay
        shutil.rmtree(PROGRAMS / path.name, ignore_errors=True)
        path.rename(PROGRAMS / path.name)
    partial.rmdir()


if __name__ == "__main__":
    main()
