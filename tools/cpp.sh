#!/bin/sh
# cpp.sh configure NAME [SANITIZERS]   writes the build files of the C++ tests in _build/NAME;
#                                      those of `unity`, and with sanitizers, compile many files of
#                                      the engine as one
# cpp.sh test NAME [SANITIZERS]        builds and runs them; for example `cpp.sh test tsan thread`
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
action=$1 build=_build/$2 sanitizers=${3:-}

# TSan's shadow memory does not fit some kernels' address space randomization.
fixed_addresses=
setarch -R true 2>/dev/null && fixed_addresses='setarch -R'

# The sanitizers' builds take two minutes each: ccache, where there is one, keeps them over `make clean`.
launcher=
if command -v ccache >/dev/null 2>&1; then
  launcher=-DCMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CCACHE_DIR="$PWD/.cache/ccache"
fi

unity=OFF optimize=-O2
[ "$2" != unity ] || unity=ON
[ -z "$sanitizers" ] || { unity=ON optimize='-O1 -g1'; }
cmake -G Ninja -S . -B "$build" --log-level=WARNING -DJAXHET_BUILD_EXTENSION=OFF \
  -DJAXHET_BUILD_TESTS=ON -DJAXHET_SANITIZE="$sanitizers" -DCMAKE_CXX_FLAGS_RELEASE="$optimize" \
  -DJAXHET_UNITY="$unity" $launcher >/dev/null
[ "$action" = configure ] && exit
# The leak check of GCC 12 can take bytes before a library's thread-local memory for sizes, and crash
# (seen in Fuzz.channel_offers after 60 s). Without this option it does not look there.
export ASAN_OPTIONS="intercept_tls_get_addr=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
cmake --build "$build" -- --quiet
$fixed_addresses ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(($(nproc) + 1))"
