#!/bin/sh
# fuzz_coverage.sh [SECONDS]: lines of the parsers of peers' bytes that the fuzzers reach, by gcov and coverage.py.
# SECONDS for each fuzzer, 5 by default. tools/fuzz_coverage.py names the parsers.
set -eu
cd "$(dirname "$0")/.."
build=_build/coverage
PATH="$PWD/.venv/bin:$PATH"
export FUZZ_SECONDS="${1:-5}"

cmake -G Ninja -S . -B "$build" --log-level=WARNING -DJAXHET_BUILD_EXTENSION=OFF -DJAXHET_BUILD_TESTS=ON \
  -DJAXHET_UNITY=ON -DCMAKE_CXX_FLAGS=--coverage -DCMAKE_CXX_FLAGS_RELEASE=-O0 >/dev/null
programs="fuzz_messages_test fuzz_channels_test fuzz_transports_test"
cmake --build "$build" --target $programs -- --quiet
find "$build" -name '*.gcda' -delete
for program in $programs; do
  "$build/tests/cpp/$program" >"$build/$program.log" 2>&1 || { cat "$build/$program.log" && exit 1; }
  grep '^fuzz' "$build/$program.log"
done

export COVERAGE_FILE="$build/python.coverage" COVERAGE_CORE=sysmon
python -m coverage run --source=jaxhet -m pytest -q -s -p no:cacheprovider tests/python/test_fuzz*.py
python -m coverage json -q -o "$build/python.json"
exec python tools/fuzz_coverage.py "$build"
