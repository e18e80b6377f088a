"""Writes GGUF files, as `ggml/docs/gguf.md` describes them and llama.cpp's converter fills them."""

import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tests.python.models.golden_models import GOLDEN

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(x: Any) -> bytes:
    """A value of metadata with its type; numbers are uint32, int64 if negative, or float32."""
    if isinstance(x, list):
        parts = [value(member) for member in x]
        kind = parts[0][:4] if parts else struct.pack("<I", 4)
        members = b"".join(part[4:] for part in parts)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(x)) + members
    if isinstance(x, bool):
        return struct.pack("<I?", 7, x)
    if isinstance(x, str):
        return struct.pack("<I", 8) + string(x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    return struct.pack("<Iq", 11, x) if x < 0 else struct.pack("<II", 4, x)


def encode(x: np.ndarray, kind: str) -> bytes:
    """The bytes of a tensor, quantized as the reference of ggml does it."""
    if kind in ("F32", "F16", "BF16"):
        return x.astype(
            {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}[kind]
        ).tobytes()
    blocks = x.astype(np.float32).reshape(-1, 32)
    if kind == "Q8_0":
        scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        steps = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), steps.view(np.uint8)], axis=1).tobytes()
    least = blocks.min(axis=1, keepdims=True).astype(np.float16)
    scales = (np.ptp(blocks, axis=1, keepdims=True) / 15).astype(np.float16)
    steps = np.rint((blocks - least) / scales.astype(np.float32)).clip(0, 15).astype(np.uint8)
    packed = steps[:, :16] | steps[:, 16:] << 4
    parts = [scales.view(np.uint8), least.view(np.uint8), packed]
    return np.concatenate(parts, axis=1).tobytes()


def contents(
    metadata: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]], version: int = 3
) -> bytes:
    """A whole file: values of metadata, and tensors with the type that each is written as."""
    alignment = metadata.get("general.alignment", 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(x) for key, x in metadata.items())
    data = b""
    for name, (x, kind) in tensors.items():
        axes = struct.pack(f"<I{x.ndim}Q", x.ndim, *x.shape[::-1])
        head += string(name) + axes + struct.pack("<IQ", TYPE_NUMBERS[kind], len(data))
        encoded = encode(x, kind)
        data += encoded + bytes(-len(encoded) % alignment)
    return head + bytes(-len(head) % alignment) + data


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a model with that `config.json`, without a tokenizer."""
    arch = config["model_type"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": x for key, x in values.items()}}


def tensors_of(
    config: dict[str, Any], tensors: dict[str, np.ndarray], kind: str
) -> dict[str, tuple[np.ndarray, str]]:
    """Hugging Face's tensors by llama.cpp's names; vectors are F32, all others of that type."""
    found = {}
    for name, x in tensors.items():
        stem, _, suffix = name.removeprefix("model.layers.").rpartition(".")
        place = ""
        if name.startswith("model.layers."):
            layer, _, stem = stem.partition(".")
            place = f"blk.{layer}."
        heads = {
            "self_attn.q_proj": config["num_attention_heads"],
            "self_attn.k_proj": config["num_key_value_heads"],
        }.get(stem)
        values = x
        if heads and config["model_type"] == "llama":
            values = permuted(x, heads)
        found[f"{place}{_STEMS[stem]}.{suffix}"] = (values, "F32" if x.ndim == 1 else kind)
    return found


def write_golden(path: Path, family: str, kind: str, more: dict[str, Any] | None = None) -> None:
    """Writes a model of `golden/`, with more metadata than its config gives."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    files = GOLDEN.joinpath(family).glob("model*.safetensors")
    tensors = {name: x for file in files for name, x in load_file(file).items()}
    metadata = metadata_of(config) | (more or {})
    path.write_bytes(contents(metadata, tensors_of(config, tensors, kind)))
