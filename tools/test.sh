#!/bin/sh
# All checks, cheapest first; the first failure ends them. Needs tools/setup.sh. The last line is pytest's.
set -eu
cd "$(dirname "$0")/.."

stage() { printf '\n== %s\n' "$*"; }

# The tests start hundreds of Python processes. Without bytecode each compiles JAX's sources, for 2 s.
unset PYTHONDONTWRITEBYTECODE

# Uses one core, as the type checker of the lint does: both run at a time.
mkdir -p _build
sh tools/docs.sh >_build/docs.log 2>&1 &
docs=$!

stage "lint"
sh tools/lint.sh quick

stage "documentation"
built=0
wait "$docs" || built=$?
cat _build/docs.log
case $built in
0) ;;
3) echo "the documentation is not built: its packages can't be installed here" ;;
*) exit "$built" ;;
esac

stage "Bazel"
if command -v bazel >/dev/null 2>&1 && [ ! -d .cache/googletest ]; then
  sh tools/bazel.sh
else
  echo "no bazel here (Debian: bazel-bootstrap), or no GoogleTest (libgmock-dev) for it: its build is not tested"
fi
stage "C++ tests under ASan and UBSan, fuzzers for 5 s each"
FUZZ_SECONDS="${FUZZ_SECONDS:-5}" sh tools/cpp.sh test asan address,undefined
stage "C++ tests under TSan"
sh tools/cpp.sh test tsan thread

stage "the newest JAX that is tested"
sh tools/next.sh

# A file belongs to one worker, and files start in the order of tests/conftest.py. Tests that start jobs
# wait much: one worker more than cores keeps all cores busy. A crashed worker is not replaced,
# because pytest-xdist then waits for ever for the rest of its files.
stage "pytest"
exec .venv/bin/python -m pytest -n "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder \
  --max-worker-restart=0 "$@"
