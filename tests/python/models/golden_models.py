"""The models of `golden/`, which `make_golden.py` has made with `transformers`."""

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = (
    "llama-2",
    "llama-3",
    "llama-3.1",
    "llama-3.2",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "qwen3-moe",
)
PROMPT = 8


def expected(family: str) -> dict[str, Any]:
    """Tokens [1, 24], logits of `transformers` in float32, and a greedy continuation [64]."""
    return load_file(GOLDEN / family / "expected.safetensors")
