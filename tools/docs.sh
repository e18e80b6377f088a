#!/bin/sh
# docs.sh: builds the documentation site in _build/site; a warning is an error. MkDocs and its plugins are the extra
# `docs` of pyproject.toml, with the hashes of tools/hashes/docs.txt, in an environment of their own: .cache/docs. Exit
# code 3: this environment can't be made here.
set -eu
cd "$(dirname "$0")/.."
environment=.cache/docs
hashes=tools/hashes/docs.txt

say() { printf 'docs: %s\n' "$*" >&2; }
die() {
  printf 'docs: missing: %s\n' "$*" >&2
  exit 3
}

usable() { "$1" -c 'import sys, venv; assert sys.version_info >= (3, 12)' >/dev/null 2>&1; }

find_python() {
  for python in ${PYTHON:+"$PYTHON"} .venv/bin/python python3.12 python3.13 python3.14 python3; do
    usable "$python" && return
  done
  die "a Python >= 3.12 with venv: run \`make setup\`, or name one in PYTHON"
}

inputs() { cksum <"$hashes"; }

install() {
  [ "$(cat "$environment/.inputs" 2>/dev/null)" = "$(inputs)" ] && return
  find_python
  say "MkDocs and its plugins, in $environment"
  "$python" -m venv --clear "$environment"
  "$environment/bin/python" -m pip --disable-pip-version-check --no-input install -q \
    --require-hashes -r "$hashes" || die "packages of the extra \`docs\`: pip could not install them"
  inputs >"$environment/.inputs"
}

install
NO_MKDOCS_2_WARNING=1 "$environment/bin/python" -m mkdocs build --strict --quiet "$@"
say "_build/site/index.html"
