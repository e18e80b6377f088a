"""Stub libraries that let the ROCm compiler plugin load on a machine without ROCm.

Each function that the plugin imports from a library of ROCm returns 1: good for compiling, which
calls none that matters, and useless for running.
"""

import collections
import ctypes
import pathlib
import re
import shutil
import subprocess
import tempfile

from jaxhet._errors import UsageError

_TOOLS = ("gcc", "nm", "readelf")
# Prefix of a symbol without a version -> the library that it is from.
_LIBRARIES = {
    "rocprofiler": "librocprofiler-sdk.so.1",
    "nccl": "librccl.so.1",
    "hipblasLt": "libhipblaslt.so.1",
    "hipfft": "libhipfft.so.0",
    "miopen": "libMIOpen.so.1",
    "rocblas": "librocblas.so.5",
    "amdsmi": "libamd_smi.so.26",
    "hip": "libamdhip64.so.7",
    "__hip": "libamdhip64.so.7",
}

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
    library_of = _versions(plugin)
    needed: Symbols = {library: collections.defaultdict(list) for library in _LIBRARIES.values()}
    for version, library in library_of.items():
        if library in needed:
            needed[library][version] = []
    for line in _output("nm", "-D", "--undefined-only", str(plugin)):
        name, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if library_of.get(version) in needed:
            needed[library_of[version]][version].append(name)
        elif not version:
            for prefix, library in _LIBRARIES.items():
                if name.startswith(prefix):
                    needed[library][""].append(name)
                    break
    return needed


def _versions(plugin: pathlib.Path) -> dict[str, str]:
    """Symbol version to library, from the plugin's version needs."""
    library, result = "", {}
    for line in _output("readelf", "-V", str(plugin)):
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            result[match[1]] = library
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
