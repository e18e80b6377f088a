#!/bin/sh
# lint.sh [quick]: format, lint and types of everything, warnings as errors. Needs tools/setup.sh.
# `quick` leaves out clang's static analyzer, which takes four times as long as all else, and clang-tidy of
# the C++ tests.
set -eu
cd "$(dirname "$0")/.."
bin=.venv/bin
leave_out=
[ "${1:-}" != quick ] || leave_out='--checks=-clang-analyzer-*'

"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/python" -m pyright --warnings

find xla_plugin tests/cpp tests/gpu tests/softverbs -name '*.cc' -o -name '*.h' | LC_ALL=C sort |
  xargs "$bin/clang-format" --dry-run -Werror

# clang-tidy needs to know how a file is compiled: by the C++ tests' build, or by the extension's. Most
# of its time goes into headers, so the quick lint reads the engine's files ten at a time.
tidy() { # tidy BUILD FOLDER...
  build=$1
  shift
  find "$@" -name '*.cc' -o -name 'unity_*.cxx' | LC_ALL=C sort |
    xargs -n 2 -P "$(nproc)" "$bin/clang-tidy" -p "$build" --quiet --warnings-as-errors='*' $leave_out
}
if [ "$leave_out" ]; then
  rm -rf _build/unity/CMakeFiles/jaxhet_core.dir/Unity # may have files of sources that are gone
  sh tools/cpp.sh configure unity
  tidy _build/unity _build/unity/CMakeFiles/jaxhet_core.dir/Unity
else
  sh tools/cpp.sh configure lint
  tidy _build/lint xla_plugin/base xla_plugin/device xla_plugin/net xla_plugin/transport xla_plugin/engine \
    tests/cpp tests/gpu tests/softverbs
fi
tidy "$(dirname "$(ls -t _build/*/_engine*.so | head -n 1)")" xla_plugin/ffi xla_plugin/python
