"""Our declarations of libibverbs against the system's header, where that is."""

import re

from tests.support import headers

_HEADER = "infiniband/verbs.h"
_VERBS = headers.ROOT / "xla_plugin" / "net" / "verbs"
_DOUBLE = headers.ROOT / "tests" / "softverbs" / "library" / "verbs_values.h"

# A member of ours is the system's at the same offset, and of the same size if it is one member.
_CHECK = """
#define CHECK(ours, member, theirs, path, same_size)                                    \\
  static_assert(offsetof(jaxhet::ibv::ours, member) == offsetof(::theirs, path) &&      \\
                (!same_size || sizeof(jaxhet::ibv::ours::member) ==                     \\
                                   sizeof(reinterpret_cast<::theirs*>(1)->path)),       \\
                #theirs "." #path);
"""


def _structs(text: str) -> list[tuple[str, str, bool, str]]:
    """Our name, the system's, whether it is the whole structure, and the members."""
    pattern = r"^struct (?:alignas\(\w+\) )?(\w+) \{ +// (ibv_\w+)(, first members)?\n(.*?)^\};"
    found = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    assert len(found) == len(re.findall(r"^struct .*\{", text, re.MULTILINE)) >= 20
    return [(ours, theirs, not partial, body) for ours, theirs, partial, body in found]


def _members(body: str) -> list[tuple[str, str, bool]]:
    """Our name, the system's path, and whether it is that one member only."""
    pointer = r"\(\*(\w+)\)\(.*\)"
    line = rf"(?! |bool )(?:\}}|.*?)\s?(?:{pointer}|(\w+))(?: = .+?)?;"
    pattern = rf"^  {line}(?: +// (from )?([\w.]+))?"
    found = re.findall(pattern, body, re.MULTILINE)
    names = [(pointer or name, path, not start) for pointer, name, start, path in found]
    return [(name, path or name, one) for name, path, one in names]


def _values(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"(k\w+) = [^;]+;\s*// (IBV_\w+)\n", text)
    assert len(found) == text.count(" // IBV_") > 40
    return found


def _functions(text: str) -> list[tuple[str, str]]:
    found = re.findall(r" (\w+)\{\s*library,\s*\"(\w+)\"", text)
    assert len(found) == len(re.findall(r"\{\s*library,", text)) > 20
    return found


def _program() -> str:
    abi = (_VERBS / "verbs_abi.h").read_text()
    api = (_VERBS / "verbs_api.h").read_text()
    lines = [headers.PRELUDE, '#include "xla_plugin/net/verbs/verbs_api.h"']
    lines.append('#include "tests/softverbs/library/verbs_values.h"')
    lines += ["#include <cstddef>", f"#include <{_HEADER}>", _CHECK]
    for ours, theirs, whole, body in _structs(abi):
        for member, path, one in _members(body):
            lines.append(f"CHECK({ours}, {member}, {theirs}, {path}, {str(one).lower()})")
        if whole:
            check = f"sizeof(jaxhet::ibv::{ours}) == sizeof(::{theirs})"
            lines.append(f'static_assert({check}, "{theirs}");')
    for ours, theirs in _values(abi + _DOUBLE.read_text()):
        check = f"static_cast<long long>(jaxhet::ibv::{ours}) == ::{theirs}"
        lines.append(f'static_assert({check}, "{theirs}");')
    for member, name in _functions(api):
        shape = f"SameShape<decltype(jaxhet::VerbsApi::{member})::Signature, decltype(::{name})>"
        lines.append(f'static_assert({shape}::value, "{name}");')
    return "\n".join(lines) + "\n"


def _compile(program: str) -> str:
    folder = headers.include_folder(_HEADER, ("/usr/include",), "Debian: libibverbs-dev")
    return headers.compile_errors(program, folder)


def test_declarations_agree_with_the_systems_header():
    assert _compile(_program()) == ""
