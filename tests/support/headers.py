"""Our declarations of C interfaces of others, compared with their headers by a C++ compiler."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Parameters and results must look the same to the compiler's calling convention: our addresses are
# void* where CUDA's are integers of the same size, and our enumerations are int.
PRELUDE = """
#include <type_traits>
template <typename T>
constexpr bool kIsWord = std::is_pointer_v<T> || std::is_integral_v<T> || std::is_enum_v<T>;
template <typename A, typename B>
constexpr bool kSame =
    sizeof(A) == sizeof(B) && alignof(A) == alignof(B) && kIsWord<A> == kIsWord<B>;
template <>
constexpr bool kSame<void, void> = true;
template <typename A, typename B>
struct SameShape : std::false_type {};
template <typename A, typename... P, typename B, typename... Q>
  requires(sizeof...(P) == sizeof...(Q))
struct SameShape<A(P...), B(Q...)>
    : std::bool_constant<kSame<A, B> && (true && ... && kSame<P, Q>)> {};
"""


def include_folder(header: str, folders: tuple[str, ...], package: str) -> str:
    """The folder with `header`, or the test is skipped; JAXHET_TEST_INCLUDE may name others."""
    named = os.environ.get("JAXHET_TEST_INCLUDE", "").split(":")
    for folder in [*named, *folders]:
        if folder and (pathlib.Path(folder) / header).exists():
            return folder
    pytest.skip(f"no {header} here ({package})")


def compile_errors(program: str, folder: str, defines: tuple[str, ...] = ()) -> str:
    """Errors of the compiler in `program`; empty if it compiles."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler")
    command = [compiler, "-x", "c++", "-std=c++20", "-w", "-fsyntax-only", "-"]
    command += [f"-I{ROOT}", "-isystem", folder, *(f"-D{define}" for define in defines)]
    result = subprocess.run(
        command, input=program, check=False, capture_output=True, text=True, timeout=120
    )
    return result.stderr if result.returncode else ""
