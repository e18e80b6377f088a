#!/bin/sh
# Builds the engine and runs the C++ tests with Bazel, in _build/bazel. Debian's needs no network.
set -eu
cd "$(dirname "$0")/.."

# Bazel does not work in a path with a space: give it a copy then.
case $PWD in
*' '*)
  copy=$(mktemp -d)
  trap 'chmod -R u+w "$copy"; rm -rf "$copy"' EXIT
  cp -R .bazelignore BUILD MODULE.bazel WORKSPACE xla_plugin "$copy"
  mkdir "$copy/tests" "$copy/tools"
  cp -R tests/cpp tests/softverbs "$copy/tests"
  cp -R tools/bazel "$copy/tools"
  cd "$copy"
  ;;
esac

status=0
run_bazel() { bazel --output_user_root="$PWD/_build/bazel" "$@"; }
# Debian turns on --sandbox_debug, whose thousands of lines would bury what failed.
run_bazel test --symlink_prefix=/ --color=no --curses=no --noshow_progress \
  --nosandbox_debug --test_output=errors //... || status=$?
run_bazel shutdown
exit $status
