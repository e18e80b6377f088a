"""Counts the faults that the tests find, by mutation of the product.

`python tools/mutants.py [--seed N] [--count N] [--under FOLDERS OR FILES] [--tree FOLDER]` changes
one place of the product at a time (a flipped comparison, a dropped call, a number that is off by
one, a condition that is inverted, a dropped lock), runs the tests that concern the file until one
fails, and takes the change back. The same seed makes the same mutants of the same product, so that
two versions of the tests can be compared: `--tree` is the checkout whose product is changed and
whose tests run. The last line has the counts.

The tests of a Python file are chosen by a rule: `tests/**/test_<name>.py`, then the files that
name the module or what it defines, those of tests/python and those with most mentions first, and
last `_PACKAGES` of its folder. The tests of a C++ file are all programs, built in `_build/unity`:
first those whose source includes its header, then those that reach it by other files. `--first N`
begins at mutant N, to continue a run.
"""

import argparse
import ast
import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

_COMPARISONS = {
    "==": "!=", "!=": "==", "<=": "<", ">=": ">", "<": "<=", ">": ">=",
    " is not ": " is ", " is ": " is not ", " not in ": " in ", " in ": " not in ",
}  # fmt: skip
_PACKAGES = {
    "jaxhet/compiler": ["python/compiler/test_decompose.py", "python/compiler/test_order.py",
                        "python/compiler/test_gpu_form.py", "python/compiler/test_numeric.py"],
    "jaxhet/_jax": ["python/test_jax_compat.py", "python/test_session.py"],
    "jaxhet/_traced": ["python/test_program.py", "python/test_session.py"],
    "jaxhet/_job": ["python/test_bootstrap.py", "python/test_coordinator.py"],
    "jaxhet/_doctor": ["python/inspect/test_doctor.py", "python/inspect/test_findings.py"],
    "jaxhet/_clusters": ["python/test_clusters.py"],
    "jaxhet/_gpu": ["python/test_gpus.py"],
    "jaxhet/cli": ["python/test_launch.py", "python/test_run.py"],
    "jaxhet": ["multiprocess/test_swapped_programs.py", "multiprocess/test_errors.py"],
}  # fmt: skip
_NUM_FILES = 8  # files of tests that name the module
_LIMIT_S = 900  # for the tests of one mutant
_NOT_BUILT = 77  # exit code where a mutant of C++ is no valid program

Mutant = tuple[int, int, str, str]  # offset, length, replacement, kind


def _python_mutants(text: str) -> list[Mutant]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset - begin

    def source(begin: int, length: int) -> str:
        return data[begin : begin + length].decode()

    found: list[Mutant] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, left_length = span(node.left)
            begin, end = left + left_length, span(node.comparators[0])[0]
            between = source(begin, end - begin)
            for old, new in _COMPARISONS.items():
                if old in between:
                    found.append((begin, end - begin, between.replace(old, new), "comparison"))
                    break
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.append((*span(node), "pass", "call"))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found.append((*span(node), str(node.value + 1), "number"))
        elif isinstance(node, ast.If):
            begin, length = span(node.test)
            found.append((begin, length, f"not ({source(begin, length)})", "condition"))
        elif isinstance(node, ast.With) and "lock" in source(*span(node.items[0].context_expr)):
            begin, length = span(node.items[0].context_expr)
            found.append((begin, length, "__import__('contextlib').nullcontext()", "lock"))
    return found


def _cpp_mutants(text: str) -> list[Mutant]:
    patterns = (
        (r" (==|!=|<=|>=|<|>) (?=[\w(-])", lambda m: f" {_COMPARISONS[m[1]]} ", "comparison"),
        (r"(?<=\n)  +[A-Za-z_]\w*(?:(?:\.|->)\w+)?\([^;{}]*\);", lambda m: ";", "call"),
        (r" [+-] 1\b", lambda m: "", "number"),
        (r"if \((?=[^;{}]*\) )", lambda m: "if (!!", "condition"),
        (r"std::(?:lock_guard|scoped_lock)[^;]*;", lambda m: ";", "lock"),
    )
    code = re.sub(r"//.*|#.*|static_assert[^;]*;", lambda m: " " * len(m[0]), text)
    found = []
    for pattern, replace, kind in patterns:
        for match in re.finditer(pattern, code):
            if kind != "condition":
                found.append((match.start(), len(match[0]), replace(match), kind))
    return found


def _mutants(tree: pathlib.Path, under: list[str]) -> list[tuple[pathlib.Path, Mutant]]:
    """All mutants of the product, in an order that does not depend on the machine."""
    found = []
    for path in sorted(
        path for one in under for path in [tree / one, *(tree / one).rglob("*")] if path.is_file()
    ):
        if path.suffix not in (".py", ".cc"):
            continue
        make = _python_mutants if path.suffix == ".py" else _cpp_mutants
        found += [(path.relative_to(tree), mutant) for mutant in make(path.read_text())]
    return found


def _tests(tree: pathlib.Path, path: pathlib.Path) -> list[str]:
    """Files of tests that concern the module, those that are likely to find a fault first."""
    stem, package = path.stem.lstrip("_"), ".".join(path.parent.parts)
    one_of = rf"from {package} import (?:[^(\n]*|\([^)]*)\b{path.stem}\b"
    defined = [
        rf"\b{node.name}\b"
        for node in ast.parse((tree / path).read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and len(node.name) > 7
    ]
    names = re.compile("|".join([rf"\b{re.escape(package)}\.{path.stem}\b", one_of, *defined]))
    named, mentions = [], []
    for test in sorted((tree / "tests").rglob("test_*.py")):
        if re.fullmatch(rf"test_{stem}s?", test.stem):
            named.append(test)
        elif not {"gpu", "rdma_vm"}.intersection(test.parts) and (
            count := len(names.findall(test.read_text()))
        ):
            mentions.append(("python" not in test.parts, -count, test))
    chosen = (named + [test for *_, test in sorted(mentions)])[:_NUM_FILES]
    general = [tree / "tests" / name for name in _PACKAGES.get(str(path.parent), [])]
    chosen += [test for test in general if test.exists()]
    return [str(test.relative_to(tree)) for test in dict.fromkeys(chosen)]


def _outcome(command: list[str], tree: pathlib.Path) -> str:
    # A file, because a process that outlives the tests would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=tree, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed by the limit of time"
        log.seek(0)
        output = log.read()
    if process.returncode == _NOT_BUILT:
        return "not compiled"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)|^\[  FAILED  \] (\S+)", output, re.MULTILINE)
    found = failed[0] if failed else output[-200:]
    return "survived" if process.returncode in (0, 5) else f"killed by {found}"


def _programs(tree: pathlib.Path, path: pathlib.Path) -> list[str]:
    """Test programs: those that include the file's header, those that reach it, all others."""
    folders = ("xla_plugin", "tests/cpp", "tests/softverbs")
    files = sorted(file for name in folders for file in (tree / name).rglob("*.*"))
    sources = {
        str(file.relative_to(tree).with_suffix("")): file.read_text()
        for file in files
        if file.suffix in (".h", ".cc")
    }
    included = re.findall(r'#include "([^"]*)\.h"', (tree / path).read_text())
    own = str(path.with_suffix(""))
    reached = {own} if own in included else {*included[:1]}
    programs: dict[str, None] = {}
    for _ in range(3):
        found = {
            name for name, text in sources.items() if any(f'"{one}.h"' in text for one in reached)
        }
        programs |= dict.fromkeys(sorted(name for name in found if name.endswith("_test")))
        reached |= found
    return [*dict.fromkeys([*programs, *(name for name in sources if name.endswith("_test"))])]


def _command(tree: pathlib.Path, path: pathlib.Path) -> list[str]:
    if path.suffix == ".cc":
        programs = _programs(tree, path)
        steps = ['PATH="$PWD/.venv/bin:$PATH"']
        for some in (programs[:_NUM_FILES], programs[_NUM_FILES:]):
            names = " ".join(program.rsplit("/")[-1] for program in some)
            steps.append(
                f"cmake --build _build/unity --target {names} -- --quiet || exit {_NOT_BUILT}"
            )
            steps += [
                f"FUZZ_SECONDS=2 _build/unity/{name} --gtest_fail_fast || exit" for name in some
            ]
        return ["sh", "-c", "\n".join(steps)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=120", "-n0"]
    return [str(tree / ".venv/bin/python"), "-m", "pytest", *options, *_tests(tree, path)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--under", nargs="+", default=["jaxhet", "xla_plugin"])
    parser.add_argument("--tree", type=pathlib.Path, default=pathlib.Path())
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the change is taken back
    tree = arguments.tree.resolve()
    drawn = random.Random(arguments.seed).sample(_mutants(tree, arguments.under), arguments.count)
    if any(path.suffix == ".cc" for path, _ in drawn):
        subprocess.run(["sh", "tools/cpp.sh", "configure", "unity"], cwd=tree, check=True)
    counts = collections.Counter[str]()
    for index, (path, (begin, length, new, kind)) in [*enumerate(drawn)][arguments.first :]:
        data = (tree / path).read_bytes()
        line = data[:begin].count(b"\n") + 1
        old = data[begin : begin + length].decode()
        start = time.monotonic()
        try:
            (tree / path).write_bytes(data[:begin] + new.encode() + data[begin + length :])
            outcome = _outcome(_command(tree, path), tree)
        finally:
            (tree / path).write_bytes(data)
        counts[outcome.split()[0]] += 1
        change = f"{kind} {old.split(chr(10))[0]!r} -> {new.split(chr(10))[0]!r}"
        seconds = time.monotonic() - start
        print(f"{index} {path}:{line} {change}: {outcome} ({seconds:.0f} s)", flush=True)
    print(f"seed {arguments.seed}: {dict(counts)}")


if __name__ == "__main__":
    main()
