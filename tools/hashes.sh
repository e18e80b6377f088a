#!/bin/sh
# Writes hashes.txt anew, from pyproject.toml and constraints.txt: the packages of the set-up, and the SHA-256 of
# each of their files. Needs the package index; run it after a change of a requirement or a pin.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m pip --disable-pip-version-check --no-input install -q -c constraints.txt \
  --target "$folder/uv" uv
"$python" - >"$folder/requirements.in" <<'END'
import tomllib
table = tomllib.load(open("pyproject.toml", "rb"))
project = table["project"]
extras = project["optional-dependencies"]
wanted = [["uv"], table["build-system"]["requires"], project["dependencies"], extras["models"], extras["test"]]
print(*(requirement for group in wanted for requirement in group), sep="\n")
END
{
  echo "# Packages that tools/setup.sh installs: the pins of constraints.txt, and the SHA-256 of each file of a release."
  echo "# Made by tools/hashes.sh; the index that serves the files is the user's choice."
  "$folder/uv/bin/uv" pip compile -q --generate-hashes --python-version 3.12 --no-annotate --no-header \
    --no-emit-index-url --no-emit-find-links -c constraints.txt "$folder/requirements.in"
} >"$folder/hashes.txt"
mv "$folder/hashes.txt" hashes.txt
