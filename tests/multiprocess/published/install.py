"""Puts programs that others published, and the packages that they import, into .cache/programs.

Flax's source distribution has examples. The packages are those of `tools/hashes/programs.txt` that
this environment lacks; 1.6 GB unpacked. TensorFlow reads the examples' data. Each file is checked
by its SHA-256.
"""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parents[3]
PROGRAMS = ROOT / ".cache" / "programs"
PACKAGES = ROOT / "tools" / "hashes" / "programs.txt"
_ENVIRONMENT = ROOT / "hashes.txt"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
_ENTRY = re.compile(r"^(\S+)==(\S+) \\\n(?: +--hash=\S+(?: \\\n|\n|\Z))+", re.MULTILINE)


def entries(text: str) -> dict[str, tuple[str, str]]:
    """Version and lines of each package in a file of hashes."""
    return {found[1]: (found[2], found[0]) for found in _ENTRY.finditer(text)}


def is_absent(name: str, version: str) -> bool:
    """Whether this environment lacks the package in this version."""
    try:
        return importlib.metadata.version(name) != version
    except importlib.metadata.PackageNotFoundError:
        return True


def _pip(command: str, lines: list[str], folder: pathlib.Path, *options: str) -> None:
    """Runs a command of pip on the packages of these lines, without their requirements."""
    chosen = folder / "chosen.txt"
    chosen.write_text("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
    common = ["--quiet", "--no-deps", "--require-hashes", "--requirement", str(chosen)]
    subprocess.run([*_PIP, command, *common, *options], check=True)
    chosen.unlink()


def main() -> None:
    partial = PROGRAMS.with_name("programs.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    packages = entries(PACKAGES.read_text())
    absent = [lines for name, (version, lines) in packages.items() if is_absent(name, version)]
    _pip("install", absent, partial, "--no-compile", "--target", str(partial / "packages"))
    _, flax = entries(_ENVIRONMENT.read_text())["flax"]
    source = ["--no-binary=flax", "--no-build-isolation", "--dest", str(partial)]
    _pip("download", [flax], partial, *source)
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
