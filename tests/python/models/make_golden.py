"""Makes `golden/`: a tiny random model of each family, and what `transformers` computes with it.

    pip install torch transformers safetensors
    python tests/python/models/make_golden.py [FOLDER]

Runs in an environment of its own, without JAX. With `--load` it writes `logits.safetensors` into
folders with a model and `expected.safetensors`: what `transformers` computes of the tokens there.
"""

# pyright: reportMissingImports=false

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_SIZE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# So short that within the tests' texts some frequencies stay, some are divided, some lie between.
_LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
_QWEN3 = {**_QWEN, "head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 10_000.0}}),
    "llama-3": ("llama", {"rope_parameters": {"rope_theta": 500_000.0}}),
    "llama-3.1": ("llama", {"rope_parameters": _LLAMA31}),
    "llama-3.2": (
        "llama",
        {"rope_parameters": _LLAMA31, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", _QWEN),
    "qwen2.5": ("qwen2", {**_QWEN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_QWEN3, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **_QWEN3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
        },
    ),
}

# A row of 24 tokens; the first 8 are continued by 64 tokens.
ROWS, POSITIONS, PROMPT, CONTINUATION = 1, 24, 8, 64


def make_model(kind: str, changes: dict[str, Any], seed: int) -> Any:
    """A model in float32 whose random parameters are bfloat16 numbers."""
    config = transformers.AutoConfig.for_model(kind, **{**_SIZE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            value = 1 + 0.1 * noise if is_norm else 0.3 * noise
            parameter.copy_(value.bfloat16().float())
    return model.float().eval()


@torch.no_grad()
def expected(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Tokens, float32 logits, a greedy continuation, and the error of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (ROWS, POSITIONS), generator=generator)
    logits = model(tokens).logits
    text = tokens[:1, :PROMPT]
    for _ in range(CONTINUATION):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], dim=1)
    two = model(text).logits[0, PROMPT - 1 : -1].topk(2).values
    print(f"  smallest margin of a greedy choice {(two[:, 0] - two[:, 1]).min():.4f}")
    narrow = model.bfloat16()(tokens).logits.float()
    model.float()
    return {
        "tokens": tokens.int(),
        "logits": logits,
        "continuation": text[0, PROMPT:].int(),
        "bfloat16_error": (narrow - logits).abs().max().reshape(1),
    }


def make(folder: Path) -> None:
    """Writes a folder for each family; the one of `llama-2` has its parameters in several files."""
    for seed, (family, (kind, changes)) in enumerate(FAMILIES.items()):
        print(family)
        model = make_model(kind, changes, seed)
        save_file(expected(model, seed), _parent(folder / family) / "expected.safetensors")
        size = "8KB" if family == "llama-2" else "1GB"
        model.bfloat16().save_pretrained(folder / family, max_shard_size=size)
        (folder / family / "generation_config.json").unlink(missing_ok=True)


def _parent(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@torch.no_grad()
def load(folder: Path) -> None:
    """Writes the logits of the model in `folder`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = load_file(folder / "expected.safetensors")["tokens"].long()
    save_file({"logits": model(tokens).logits}, folder / "logits.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "golden")
    parser.add_argument("--load", nargs="+", type=Path, default=[], metavar="FOLDER")
    options = parser.parse_args()
    for folder in options.load:
        load(folder)
    if not options.load:
        make(options.folder)
