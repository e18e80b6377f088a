"""The models of `golden/`, which `make_golden.py` has made with `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from models.configs import Config
from models.generate import decode, prefill
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


def step_by_step(
    config: Config, params: Params, tokens: Any, jit: Callable[..., Any]
) -> np.ndarray:
    """Logits [B, T - PROMPT + 1, V] after the prompt and after each token behind it, with a cache.

    The texts are `tokens` [B, T]; the last logits are those after all of them.
    """
    model = graph(config)
    batch, room = tokens.shape
    begin = jit(lambda p, *args: prefill(nnx.merge(model, p), *args, room=room))
    advance = jit(lambda p, *args: decode(nnx.merge(model, p), *args))
    logits, past = begin(params, tokens[:, :PROMPT], np.full(batch, PROMPT, np.int32))
    results = [logits]
    for position in range(PROMPT, room):
        lengths = np.full(batch, position, np.int32)
        logits, past = advance(params, tokens[:, position], past, lengths)
        results.append(logits)
    return np.stack([np.asarray(logits) for logits in results], axis=1)
