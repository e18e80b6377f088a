"""Measures each family against `transformers`, and writes `models/reports/families.md`.

    python -m tests.python.models.family_table [FILE]

Needs the environment of `tools/setup.sh test` with torch and transformers. Exits with 1, and with
words, if a number misses its bound; the table is written all the same.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxhet
from models import convert
from models.generate import generate
from models.huggingface import load, save
from tests.python.models.conftest import FAST_COMPILE
from tests.python.models.golden_models import (
    FAMILIES,
    GOLDEN,
    PROMPT,
    expected,
    step_by_step,
    tensors,
    whole,
)
from tests.python.models.reference import PYTHON, ROOT, logits_of_exports

REPORT = ROOT / "models" / "reports" / "families.md"
WIDE = {"dtype": "float32", "param_dtype": "float32"}
# Largest error of logits in float32, and of bfloat16 as a multiple of the one of `transformers`.
LOGITS, BFLOAT16 = 1e-4, 2.0

_TEXT = """# Families against transformers

`python -m tests.python.models.family_table`: on CPU, the small random models of
`tests/python/models/golden/` (2 layers, 64 tokens, parameters that are bfloat16 numbers), and
what `transformers` {version} computes with them.

| family | float32 | cached decoding | bfloat16 | greedy tokens | load | export | round trip |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Errors are the largest absolute differences. The largest logits of the families are between
{least:.1f} and {most:.1f}.

- float32: logits of a text of 24 tokens, against `transformers`; at most {logits:g}.
- Cached decoding: logits after each token, from a prompt of 8 tokens on, with the KV cache,
  against `transformers`; at most {logits:g}.
- bfloat16: logits computed in bfloat16, against float32 of `transformers`. In parentheses: ratio
  to the error of `transformers` in bfloat16; at most {bfloat16:g}.
- Greedy tokens: equal ones among the 64 tokens after the prompt.
- Load: parameters that were divided over `fsdp=2,model=2`, against the file; 0.
- Export: logits of `transformers` with the folder that `models.huggingface.save` has written,
  against those with its own folder; at most {logits:g}.
- Round trip: tensors with the same bits after `models.convert import` and `export`.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """Errors of a family. `greedy` counts equal tokens, `same` equal tensors."""

    family: str
    logits: float
    cached: float
    bfloat16: float
    bfloat16_ratio: float
    greedy: tuple[int, int]
    load: float
    export: float
    same: tuple[int, int]

    def __str__(self) -> str:
        cells = (
            f"`{self.family}`",
            f"{self.logits:.1e}",
            f"{self.cached:.1e}",
            f"{self.bfloat16:.1e} ({self.bfloat16_ratio:.2f})",
            "{} of {}".format(*self.greedy),
            f"{self.load:g}",
            f"{self.export:.1e}",
            "{} of {}".format(*self.same),
        )
        return f"| {' | '.join(cells)} |"

    def missed(self) -> list[str]:
        """The measures that miss their bounds."""
        is_met = {
            "logits": self.logits <= LOGITS,
            "cached decoding": self.cached <= LOGITS,
            "bfloat16": self.bfloat16_ratio <= BFLOAT16,
            "greedy tokens": self.greedy[0] == self.greedy[1],
            "load": self.load == 0,
            "export": self.export <= LOGITS,
            "round trip": self.same[0] == self.same[1],
        }
        return [f"{self.family}: {name}" for name, met in is_met.items() if not met]


def measure(family: str, folder: Path, opened: np.ndarray) -> Row:
    """The row of a family, given the logits of `transformers` with its export."""
    golden, jit = expected(family), functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    tokens, logits = golden["tokens"], golden["logits"]
    one = jaxhet.make_mesh({"data": 1}, devices=jax.devices()[:1])
    config, params = load(GOLDEN / family, one, **WIDE)
    prompt = tokens[0, :PROMPT].tolist()
    continuation = generate(config, params, [prompt], len(golden["continuation"])).tokens[0]
    narrow = _error(whole(*load(GOLDEN / family, one), tokens, jit), logits)
    return Row(
        family,
        logits=_error(whole(config, params, tokens, jit), logits),
        cached=_error(step_by_step(config, params, tokens, jit), logits[:, PROMPT - 1 :]),
        bfloat16=narrow,
        bfloat16_ratio=narrow / float(golden["bfloat16_error"][0]),
        greedy=_equal(continuation, golden["continuation"]),
        load=_load_error(family, folder / "wide"),
        export=_error(opened, logits),
        same=_round_trip(family, folder),
    )


def _load_error(family: str, folder: Path) -> float:
    """Loads parameters split over a mesh; returns their largest error."""
    mesh = jaxhet.make_mesh({"fsdp": 2, "model": 2})
    save(folder, *load(GOLDEN / family, mesh, **WIDE))
    theirs, ours = tensors(GOLDEN / family), tensors(folder)
    if theirs.keys() != ours.keys():
        return float("inf")
    return max(_error(ours[name], theirs[name].astype(np.float32)) for name in theirs)


def _round_trip(family: str, folder: Path) -> tuple[int, int]:
    convert.main(["import", str(GOLDEN / family), str(folder / "checkpoint")])
    convert.main(["export", str(folder / "checkpoint"), str(folder / "back")])
    theirs, back = tensors(GOLDEN / family), tensors(folder / "back")
    same = [
        back[name].dtype == x.dtype and back[name].tobytes() == x.tobytes()
        for name, x in theirs.items()
        if name in back
    ]
    return sum(same), len(theirs.keys() | back.keys())


def _error(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(ours, np.float32) - theirs).max())


def _equal(ours: Any, theirs: Any) -> tuple[int, int]:
    return int((ours == theirs).sum()), len(theirs)


def _version() -> str:
    """The version of `transformers` that is installed there."""
    (found,) = PYTHON.parents[1].glob("lib/python*/site-packages/transformers-*.dist-info")
    return found.name.removeprefix("transformers-").removesuffix(".dist-info")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=REPORT, help="report to write")
    file = parser.parse_args().file
    if not PYTHON.exists():
        sys.exit("no torch and transformers: run tools/setup.sh test, which installs them.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    one = jaxhet.make_mesh({"data": 1}, devices=jax.devices()[:1])
    with tempfile.TemporaryDirectory() as name:
        opened = logits_of_exports(FAMILIES, Path(name) / "exports", one)
        rows = [measure(family, Path(name) / family, opened[family]) for family in FAMILIES]
    largest = [float(np.abs(expected(family)["logits"]).max()) for family in FAMILIES]
    text = _TEXT.format(
        version=_version(),
        rows="\n".join(map(str, rows)),
        least=min(largest),
        most=max(largest),
        logits=LOGITS,
        bfloat16=BFLOAT16,
    )
    file.write_text(text)
    missed = [words for row in rows for words in row.missed()]
    if missed:
        sys.exit(f"beyond their bounds: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
