"""Our declarations of CUDA's driver and of HIP against the vendors' headers, where those are."""

import dataclasses
import re

import pytest

from tests.support import headers

_DEVICE = headers.ROOT / "xla_plugin" / "device"


@dataclasses.dataclass(frozen=True)
class _Vendor:
    """A vendor's header, and where ours says the same."""

    ours: str
    struct: str
    header: str
    folders: tuple[str, ...]
    defines: tuple[str, ...]
    major: str  # the header's major version, for #if


_VENDORS = {
    "cuda": _Vendor(
        "cuda/cuda_api.h",
        "CudaApi",
        "cuda.h",
        ("/usr/local/cuda/include", "/opt/cuda/include", "/usr/include"),
        (),
        "CUDA_VERSION / 1000",
    ),
    "hip": _Vendor(
        "hip/hip_api.h",
        "HipApi",
        "hip/hip_runtime_api.h",
        ("/opt/rocm/include", "/usr/include"),
        ("__HIP_PLATFORM_AMD__", "__HIP_DISABLE_CPP_FUNCTIONS__"),
        "HIP_VERSION_MAJOR",
    ),
}


def _functions(text: str) -> list[tuple[str, str, int]]:
    """Member, the vendor's name and the major version that has it first of every entry point."""
    found = re.findall(r" (\w+)\{\s*library,\s*\"(\w+)\"(,?)", text)
    assert len(found) > 30
    return [(member, name, 7 if optional else 0) for member, name, optional in found]


def _values(text: str) -> list[tuple[str, str, str]]:
    """Our constant, the vendor's, and the major version that has it first ("" for all)."""
    found = re.findall(r"(k\w+) =\s[^;]+;\s*// ((?:CU|hip|HIP)\w+)(?: \((\d)\))?\n", text)
    assert len(found) == len(re.findall(r";\s*// (?:CU|hip|HIP)", text)) > 12
    return found


def _program(vendor: _Vendor) -> str:
    text = (_DEVICE / vendor.ours).read_text()
    lines = [
        headers.PRELUDE,
        f'#include "xla_plugin/device/{vendor.ours}"',
        f"#include <{vendor.header}>",
    ]
    lines.append(f"using Api = jaxhet::{vendor.struct};")
    for member, name, since in _functions(text):
        if name.startswith("hsa_"):
            continue  # another header's
        shape = f"SameShape<decltype(Api::{member})::Signature, decltype(::{name})>"
        check = f'static_assert({shape}::value, "{name}");'
        lines += [f"#if {vendor.major} >= {since}", check, "#endif"]
    for ours, theirs, since in _values(text):
        check = f'static_assert(static_cast<long long>(Api::{ours}) == {theirs}, "{theirs}");'
        lines += [f"#if {vendor.major} >= {since or 0}", check, "#endif"]
    return "\n".join(lines) + "\n"


def _compile(vendor: _Vendor, program: str) -> str:
    package = "Debian: libamdhip64-dev; CUDA: the toolkit"
    folder = headers.include_folder(vendor.header, vendor.folders, package)
    return headers.compile_errors(program, folder, vendor.defines)


@pytest.mark.parametrize("name", _VENDORS)
def test_declarations_agree_with_the_vendors_header(name: str):
    vendor = _VENDORS[name]
    assert _compile(vendor, _program(vendor)) == ""
