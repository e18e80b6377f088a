#!/bin/sh
# next.sh [ARGUMENT...]: the tests that depend most on JAX, and a short demo, with the newest JAX that is tested
# (constraints-next.txt) and the extension as it is, built with the headers of jax 0.11.2. With arguments: pytest's.
set -eu
cd "$(dirname "$0")/.."
if [ ! -d .cache/jax-next ]; then
  echo "no .cache/jax-next (sh tools/setup.sh test): the newest JAX is not tested"
  exit
fi
export PYTHONPATH="$PWD/.cache/jax-next"
.venv/bin/python -c 'import jax; print("jax", jax.__version__)'
[ $# = 0 ] || exec .venv/bin/python -m pytest "$@"
.venv/bin/python -m pytest -q -n "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
  tests/python/compiler/test_hlo.py tests/python/compiler/test_refusals.py \
  tests/python/test_jax_*.py tests/python/test_compiler_settings.py tests/python/test_program.py \
  tests/multiprocess/test_jax_api.py tests/multiprocess/test_cache.py tests/multiprocess/test_shared_executables.py
[ ! -d .cache/plugins-next ] || for vendor in cuda rocm; do
  echo "a training step planned for $vendor:"
  PYTHONPATH="$PYTHONPATH:$PWD/.cache/plugins-next" PRETRAIN="--config tiny --mesh fsdp=4" .venv/bin/python -m jaxhet.cli plan \
    models.extras.planned:step --vendor "$vendor" --islands 2 --devices 2 | tail -n 1
done
.venv/bin/python -m benchmarks.demo --steps 24 --run-dir runs/next
