"""The models of `golden/`, which `make_golden.py` has made with `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

from models.configs import Config
from models.huggingface import Params
from models.llama import Llama

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
WIDE = {"dtype": "float32", "param_dtype": "float32"}


def each_family(*quick: str) -> pytest.MarkDecorator:
    """A test of every family, which is slow but for these."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in quick]
    return pytest.mark.parametrize("family", [*quick, *slow])


def save_words(path: Path, *others: str, number: int = 64) -> None:
    """A tokenizer of the words w0, w1 and so on, and others."""
    words = [*(f"w{i}" for i in range(number)), *others]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def expected(family: str) -> dict[str, Any]:
    """Tokens [1, 24], logits of `transformers` in float32, and a greedy continuation [64]."""
    return load_file(GOLDEN / family / "expected.safetensors")


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors in a folder's safetensors files."""
    return {k: v for path in folder.glob("model*.safetensors") for k, v in load_file(path).items()}


def assert_same_bits(folder: Path, other: Path) -> None:
    """Checks that two folders have the same tensors."""
    first, second = tensors(folder), tensors(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert (values.dtype, values.shape) == (second[name].dtype, second[name].shape)
        assert values.tobytes() == second[name].tobytes(), name


def graph(config: Config) -> Any:
    """The model without its parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))


def whole(config: Config, params: Params, tokens: Any, jit: Callable[..., Any]) -> np.ndarray:
    """Logits [B, T, V] of whole texts."""
    compute = jit(lambda params: nnx.merge(graph(config), params)(tokens))
    return np.asarray(compute(params))
