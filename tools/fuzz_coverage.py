"""fuzz_coverage.py BUILD: lines of the parsers of peers' bytes that the fuzzers have reached.

`tools/fuzz_coverage.sh` makes the run. Prints a line for each file, with the function and number of
each line that was not reached, and the share of all lines; fails below 95 %.
"""

import json
import pathlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

_LEAST = 0.95
# Functions that read bytes of peers or check what these say, by file of the engine.
CPP = {
    "base/checked.h": "Take",
    "net/socket/socket.cc": "Parse|ReadMore|Next",
    "engine/common/wire.cc": "TakeBytes|ParseFail|UnpackStrings",
    "engine/common/wire.h": "TakeInfo",
    "engine/control/negotiation.cc": "Apply|Await|AnswerHello|Conclude",
    "engine/progress_engine.cc": "OnMessage",
    "engine/host/open_exchanges.cc": "OnStart|Meet|CheckLeft|CheckStart|CheckRanks",
    "engine/control/peer_table.h": "Received",
    "engine/common/plans.cc": "Add",
    "engine/device/channel_setup.cc": ("Handle|Open|Accept|Prove|Expect|IsAllowed|Find"),
    "net/connection.h": "Reserve",
    "net/seal.cc": "Take|OpenNext|Room",
    "net/socket/socket_connection.cc": "Accept|OnMessage|Receive|OnConfirmed|OnLeftByPeer",
    "transport/device_channel/shared_memory.cc": "SharedMemory|Take|TakeFds",
    "transport/process_vm/process_vm.cc": "ParseSegments|OnMessage|Begin|Accept|ReadState",
    "transport/device_channel/device_channel.cc": "CheckSlotBytes",
    "transport/device_channel/shared_channels.cc": (
        "Open|CheckPlace|ParseSharedChannelInfo|OpenOperands"
    ),
    "transport/device_channel/lane_channel.cc": (
        "Accept|IsReady|Find|Expected|Moved|ParseDeviceChunkInfo|IsAgreed"
    ),
    "transport/device_channel/lane_channel.h": "OpenLaneChannel",
    "net/verbs/verbs_connection.cc": "OnImmediate|Accept|SetUpNicPair|Drain",
}
# The same of jaxhet: classes' and functions' names.
_PYTHON = {
    "_net/handshake.py": "receive_exactly|connect|accept",
    "_net/channel.py": r"Channel\.(receive|_opened)",
    "_job/listener.py": r"Listener\._authenticate|_check_answer",
    "_net/interfaces.py": r"Interface\.parse",
    "_job/process_info.py": r"ProcessInfo\.(from_json|__str__)|disagreement|_\w+_disagree",
    "_job/coordinator.py": r"Coordinator\.(_receive_info|_follow)|Terms\.(place|disagreement)",
    "_job/membership.py": r"Membership\.(join|_begin|_certified|_hear|_follow)|_not_understood",
    "_net/certificates.py": r"Authority\.(sign|_sign)",
    "_errors.py": "from_json",
    "_json.py": "decode",
}
_NOTHING = "(?!)"
_ALTERNATIVE = re.compile(r"(?:\([^)]*\)|[^|(])+")  # parts of a pattern between its outer bars
_NAME = re.compile(r"(\w+)(?:\[abi:\w+\])*(?:<.*>)?\(")

# Whether a line was reached, by file, and function and line.
_Lines = dict[str, dict[tuple[str, int], bool]]


def reached(build: pathlib.Path) -> _Lines:
    """Whether each line of the parsers was reached."""
    lines: _Lines = defaultdict(dict)
    for file, function, line, was_reached in (*_cpp_lines(build), *_python_lines(build)):
        key = function, line
        lines[file][key] = lines[file].get(key, False) or was_reached
    return lines


def _cpp_lines(build: pathlib.Path) -> Iterator[tuple[str, str, int, bool]]:
    for data in build.rglob("*.gcda"):
        command = ["gcov", "--json-format", "--stdout", str(data)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for report in map(json.loads, text.splitlines()):
            for file in report["files"]:
                name = file["file"].partition("xla_plugin/")[2]
                names = {f["name"]: _short(f["demangled_name"]) for f in file["functions"]}
                for line in file["lines"]:
                    function = names.get(line.get("function_name", ""), "")
                    if re.fullmatch(CPP.get(name, _NOTHING), function):
                        yield name, function, line["line_number"], line["count"] > 0


def _python_lines(build: pathlib.Path) -> Iterator[tuple[str, str, int, bool]]:
    report = json.loads((build / "python.json").read_text())
    for path, file in report["files"].items():
        name = path.rpartition("jaxhet/")[2]
        for function, found in file["functions"].items():
            if re.fullmatch(_PYTHON.get(name, _NOTHING), function):
                yield from ((name, function, line, True) for line in found["executed_lines"])
                yield from ((name, function, line, False) for line in found["missing_lines"])


def _short(demangled: str) -> str:
    """The name of a function without its class and arguments; for a lambda, its function's."""
    found = _NAME.search(demangled.replace("(anonymous namespace)", ""))
    return found[1] if found else ""


def _unknown(lines: _Lines) -> Iterator[str]:
    """Functions that are named above and that no file has."""
    for name, pattern in (CPP | _PYTHON).items():
        functions = {function for function, _ in lines.get(name, {})}
        for one in _ALTERNATIVE.findall(pattern):
            if not any(re.fullmatch(one, function) for function in functions):
                yield f"{one} of {name}"


def main() -> int:
    """Prints the lines of all files."""
    lines = reached(pathlib.Path(sys.argv[1]))
    for name, known in sorted(lines.items()):
        missed = sorted(f"{function}:{line}" for (function, line), was in known.items() if not was)
        print(f"{sum(known.values()):4} of {len(known):4}  {name}  {' '.join(missed)}")
    total = sum(len(known) for known in lines.values())
    hit = sum(sum(known.values()) for known in lines.values())
    print(f"{hit} of {total} lines of parsers reached: {hit / max(total, 1):.1%}")
    missing = sorted(_unknown(lines))
    if missing:
        print(f"no such function: {', '.join(missing)}")
    return 0 if not missing and hit >= _LEAST * total else 1


if __name__ == "__main__":
    sys.exit(main())
