"""`transformers` itself, in the environment that `tools/setup.sh test` makes if it can."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from safetensors.numpy import load_file

from models.huggingface import load, save
from tests.python.models.golden_models import GOLDEN

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".cache" / "transformers" / "bin" / "python"


def run_golden(*arguments: str) -> None:
    """Runs `make_golden.py` in that environment."""
    script = ROOT / "tests" / "python" / "models" / "make_golden.py"
    subprocess.run([PYTHON, script, *arguments], check=True, timeout=280)


def logits_of_exports(families: Sequence[str], folder: Path, mesh: jax.sharding.Mesh) -> dict:
    """Exports golden models under `folder`; the logits of `transformers` with them, by family."""
    for family in families:
        config, params = load(GOLDEN / family, mesh)
        save(folder / family, config, params, file_bytes=8000)
        shutil.copy(GOLDEN / family / "expected.safetensors", folder / family)
    run_golden("--load", *(str(folder / family) for family in families))
    return {f: load_file(folder / f / "logits.safetensors")["logits"] for f in families}
