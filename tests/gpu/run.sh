#!/bin/sh
# Builds the device tests (no network, no CUDA, no ROCm) and runs each of them on this machine's
# NVIDIA GPUs: as vendor cuda, and as vendor hip through the double, libamdhip64 over CUDA.
# Prints a table and the calls of every HIP entry point. Exit code: 0 passed, 1 failed, 77 no GPU.
# COMPUTE_SANITIZER=memcheck (or racecheck, …): every test runs under that tool, and fails if it
# finds something. Calls that fail are no find: some tests want them to.
set -eu
cd "$(dirname "$0")/../.."
build=_build/gpu
logs=$build/device_logs
limit_s=60
sanitizer=
if [ -n "${COMPUTE_SANITIZER:-}" ]; then
  sanitizer="compute-sanitizer --tool $COMPUTE_SANITIZER --target-processes all --error-exitcode 9"
  [ "$COMPUTE_SANITIZER" != memcheck ] || sanitizer="$sanitizer --report-api-errors no"
fi

generator=
command -v ninja >/dev/null 2>&1 && generator='-G Ninja'
mkdir -p "$build"
{
  cmake $generator -S . -B "$build" -DJAXHET_BUILD_EXTENSION=OFF -DJAXHET_BUILD_TESTS=ON &&
    cmake --build "$build" --target gpu_device_test hip_double -j "$(nproc)"
} >"$build/build.txt" 2>&1 || {
  tail -n 30 "$build/build.txt"
  echo "the build failed; all of its output: $build/build.txt"
  exit 1
}
program=$build/tests/gpu/gpu_device_test
library_of() { # library_of VENDOR
  case $1 in
  cuda) echo libcuda.so.1 ;;
  hip) echo "$PWD/$build/tests/gpu/libamdhip64.so" ;;
  esac
}

num_gpus=$("$program" cuda libcuda.so.1 devices) || {
  echo "skipped: no GPU: $num_gpus"
  exit 77
}
visible=${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $((num_gpus - 1)))}
first=$(echo "$visible" | cut -d , -f 1)
second=$(echo "$visible" | cut -d , -f 2) # the first again if there is no second

run() { # run VENDOR TEST: writes the log and prints one word
  log=$logs/$1-$2.txt
  only=$visible
  [ "$2" != ipc ] || only=$first
  CUDA_VISIBLE_DEVICES=$only timeout -k 5 "$limit_s" ${sanitizer:+$sanitizer --log-file "$log.found"} \
    "$program" "$1" "$(library_of "$1")" "$2" "$second" >"$log" 2>&1 && code=0 || code=$?
  case $code:$(tail -n 1 "$log") in
  0:ok | 0:skip*) tail -n 1 "$log" | cut -d : -f 1 ;;
  9:*) cat "$log.found" >>"$log" && echo FAIL ;;
  124:* | 137:*) echo "FAIL: not done after $limit_s s" >>"$log" && echo FAIL ;;
  *) echo FAIL ;;
  esac
}

rm -rf "$logs"
mkdir -p "$logs"
failed=0
echo "device layer on $num_gpus GPU(s); two-process tests: GPU $first with GPU $second"
printf '%-16s %-6s %-6s\n' test cuda hip
for test in $("$program" cuda libcuda.so.1 list); do
  cuda=$(run cuda "$test")
  hip=$(run hip "$test")
  printf '%-16s %-6s %-6s\n' "$test" "$cuda" "$hip"
  case $cuda$hip in *FAIL*) failed=1 ;; esac
done

echo "notes:"
sed -n 's/^  \(.*turns.*\|.*dma-buf.*\)/  \1/p' "$logs"/*.txt
for log in "$logs"/*.txt; do
  sed -n "s|^skip|  $(basename "$log" .txt): skip|p" "$log"
  ! grep -q '^FAIL' "$log" && [ "$(tail -n 1 "$log")" = ok ] || grep -q '^skip' "$log" || {
    echo "  $(basename "$log" .txt):"
    grep -v '^calls' "$log" | tail -n 6 | cut -c 1-300
  }
done

echo "calls of each HIP entry point:"
calls=$(awk '/^calls/ { n[$2] += $3 } END { for (name in n) print n[name], name }' "$logs"/hip-*.txt | sort -k 2)
echo "$calls" | awk '{ printf "%7d %-34s%s", $1, $2, NR % 3 ? "" : "\n" } END { print "" }'
if [ -z "$calls" ] || echo "$calls" | grep -q '^0 '; then
  echo "FAIL: not every HIP entry point was called"
  failed=1
fi
[ "$failed" = 0 ] && echo "passed" || echo "FAILED; logs: $logs"
exit "$failed"
