"""Stub libraries that let the ROCm compiler plugin load on a machine without ROCm.

Each function that the plugin imports from a library of ROCm returns 1. The compiler needs the
result of none of them; programs can't run.
"""

import ctypes
import pathlib
import re
import shutil
import subprocess
import tempfile

from jaxhet._errors import UsageError

_TOOLS = ("gcc", "nm", "readelf")

Symbols = dict[str, dict[str, list[str]]]  # library -> version or "" -> names


def load(plugin: pathlib.Path) -> None:
    """Builds the stubs that `plugin` needs and loads them.

    Raises:
      UsageError: a tool to build them with is missing.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise UsageError(
            f"the ROCm compiler needs stub libraries, and {', '.join(missing)} to build them;"
            " install a C compiler and binutils"
        )
    with tempfile.TemporaryDirectory() as folder:
        for library, versions in _needed(plugin).items():
            path = pathlib.Path(folder) / library
            _build(path, versions)
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _needed(plugin: pathlib.Path) -> Symbols:
    """Libraries that `plugin` needs and this machine lacks, with the functions they must have."""
    present: list[ctypes.CDLL] = []
    needed: Symbols = {}
    for line in _output("readelf", "-d", str(plugin)):
        if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            try:
                present.append(ctypes.CDLL(match[1]))
            except OSError:
                needed[match[1]] = {"": []}
    libraries_of = _versions(plugin)
    for version, libraries in libraries_of.items():
        for library in libraries & needed.keys():
            needed[library][version] = []
    for line in _output("nm", "-D", "--undefined-only", str(plugin)):
        kind, _, symbol = line.strip().partition(" ")
        name, _, version = symbol.replace("@@", "@").partition("@")
        if version:
            for library in libraries_of[version] & needed.keys():
                needed[library][version].append(name)
        elif kind == "U" and needed and not any(hasattr(library, name) for library in present):
            next(iter(needed.values()))[""].append(name)  # the loader looks in all of them
    return needed


def _versions(plugin: pathlib.Path) -> dict[str, set[str]]:
    """Libraries that define a version of symbols, by the version."""
    library = ""
    result: dict[str, set[str]] = {}
    for line in _output("readelf", "-V", str(plugin)):
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            result.setdefault(match[1], set()).add(library)
    return result


def _build(path: pathlib.Path, versions: dict[str, list[str]]) -> None:
    source = "".join(
        f"int {n}(void) {{ return 1; }}\n" for names in versions.values() for n in names
    )
    script = "".join(
        f"{version} {{ {'global: ' if names else ''}{''.join(n + ';' for n in names)} }};\n"
        for version, names in versions.items()
        if version
    )
    arguments = [
        "gcc",
        "-w",
        "-fno-builtin",
        "-shared",
        "-fPIC",
        "-xc",
        "-",
        f"-Wl,-soname,{path.name}",
    ]
    if script:
        script_path = path.with_suffix(".map")
        script_path.write_text(script)
        arguments.append(f"-Wl,--version-script={script_path}")
    subprocess.run([*arguments, "-o", str(path)], input=source, text=True, check=True)


def _output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
