"""Models in GGUF files, in Hugging Face's terms: config, tensors, tokenizer.

llama.cpp has names of its own for tensors. The rows of LLaMA's queries and keys are in another
order there: its rotary positions turn pairs of neighbours, Hugging Face's a half by the other one.
"""

import contextlib
import importlib.util
import re
from typing import Any

import numpy as np

from models.gguf import File

# Whether queries and keys are in pairs of neighbours, by `general.architecture`, which is also
# Hugging Face's `model_type`.
_IN_PAIRS = {"llama": True, "qwen2": False, "qwen3": False}

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# A layer's tensors: behind `blk.N.`, and behind `model.layers.N.`.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>[0-9]+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")
_PAIRED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

# Metadata of a model, by the key behind its architecture.
_HEADS, _HEAD_SIZE = "attention.head_count", "attention.key_length"
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    _HEADS: "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    _HEAD_SIZE: "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}
_REALS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
# Sizes that are that of a head.
_HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
# Keys with one value that changes nothing; any other value is refused.
_FIXED: dict[str, Any] = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}

_TOKENIZER = "tokenizer.ggml."
# How text is cut before pairs are merged, by `tokenizer.ggml.pre`: whether each digit is alone.
_DIGITS_ALONE = {"gpt-2": False, "smollm": True}
_CONTROL, _USER_DEFINED = 3, 4
_INSTEAD = "Put the model's tokenizer.json beside it and name their folder, or give tokens."


def config_json(file: File) -> dict[str, Any]:
    """The equivalent of Hugging Face's `config.json`.

    `dtype` is the type that all matrices share; float32 if they are unlike or quantized.

    Raises:
      ValueError: The file holds a model of an unknown kind.
    """
    name = _architecture(file)
    given = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    known = {*_SIZES, *_REALS, *_HEAD_SIZES, *_FIXED}
    for key, value in given.items():
        if key not in known or value != _FIXED.get(key, value):
            raise _refusal(
                file, f"{name}.{key}", value, f"known keys are {', '.join(sorted(known))}"
            )
    if _ROPE_FACTORS in file.tensors:
        raise ValueError(
            f"{file.path} has scaled rotary positions as the tensor {_ROPE_FACTORS}, without the "
            "numbers that a config needs: take Hugging Face's folder of this model."
        )
    if _HEADS not in given:
        raise _refusal(file, f"{name}.{_HEADS}", None, "it must be there")
    sizes = {theirs: _size(file, f"{name}.{key}") for key, theirs in _SIZES.items() if key in given}
    if "token_embd.weight" in file.tensors:
        sizes.setdefault("vocab_size", file.tensors["token_embd.weight"].shape[0])
    head = sizes.get("head_dim") or sizes.get("hidden_size", 0) // sizes["num_attention_heads"]
    for key in _HEAD_SIZES:
        if given.get(key, head) != head:
            raise _refusal(file, f"{name}.{key}", given[key], f"a head has the size {head}")
    matrices = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    tokens = {key: file.metadata.get(_TOKENIZER + key) for key in ("bos_token_id", "eos_token_id")}
    return {
        "model_type": name,
        **sizes,
        "head_dim": head,
        **{t: _real(file, f"{name}.{key}") for key, t in _REALS.items() if key in given},
        **{key: token for key, token in tokens.items() if isinstance(token, int)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(matrices), "float32"),
    }


def _architecture(file: File) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _IN_PAIRS:
        known = f"known ones are {', '.join(_IN_PAIRS)}"
        raise _refusal(file, "general.architecture", name, known)
    return name


def _size(file: File, key: str) -> int:
    value = file.metadata[key]
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _refusal(file, key, value, "it must be a positive number")
    return value


def _real(file: File, key: str) -> float:
    """A real number, as it was before it was rounded to float32: 1e-5 and not 9.99999975e-6."""
    value = file.metadata[key]
    if type(value) is not float or not 0 < value < float("inf"):
        raise _refusal(file, key, value, "it must be a positive number")
    return float(str(np.float32(value)))


def _refusal(file: File, key: str, value: Any, why: str) -> ValueError:
    return ValueError(f"{file.path}: {key} {str(value)[:80]!r} can't be represented: {why}.")


class Tensors(contextlib.AbstractContextManager):
    """A model's tensors by Hugging Face's names, decoded. A context manager."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._names = {_theirs(name): name for name in file.tensors}
        self._head = config_json(file)["head_dim"] if _IN_PAIRS[_architecture(file)] else 0

    def __exit__(self, *_: object) -> None:
        """Does nothing: the file is closed when nobody has it any more."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {theirs: self._file.tensors[name].shape for theirs, name in self._names.items()}

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; no other rows are decoded."""
        tensor = self._file.tensors[self._names[name]]
        rows = where[0]
        if self._head and _PAIRED.fullmatch(name):
            rows = _halves(tensor.shape[0], self._head)[rows]
        return self._file.read(tensor.name, rows)[:, *where[1:]]


def _theirs(name: str) -> str:
    """Hugging Face's name of a tensor; an unknown one stays, for the error that names it."""
    found = _NAME.fullmatch(name)
    layer = found and found["layer"]
    stem = found and (_TENSORS if layer is None else _LAYER_TENSORS).get(found["stem"])
    if not found or not stem:
        return name
    place = "" if layer is None else f"model.layers.{layer}."
    return f"{place}{stem}.{found['kind']}"


def _halves(num_rows: int, head: int) -> np.ndarray:
    """Which row of pairs each row of halves is: 0, 2, 4, …, then 1, 3, 5, … of each head."""
    return np.arange(num_rows).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()


def tokenizer_json(file: File) -> str:
    """The file's tokenizer as a `tokenizer.json`, always with the same bytes.

    Raises:
      ValueError: The library `tokenizers` is missing, or knows no such tokenizer.
    """
    kind, pre = (file.metadata.get(_TOKENIZER + key) for key in ("model", "pre"))
    if kind != "gpt2" or pre not in _DIGITS_ALONE:
        raise ValueError(
            f"{file.path} has a tokenizer of kind {str(kind)[:80]!r}, cut by {str(pre)[:80]!r}; "
            f"only gpt2, cut by {' or '.join(_DIGITS_ALONE)} can be rebuilt. {_INSTEAD}"
        )
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(f"the tokenizer of {file.path} needs tokenizers: pip install tokenizers.")
    import tokenizers  # pyright: ignore[reportMissingImports]

    tokens, merges = (_list(file, key, str) for key in ("tokens", "merges"))
    kinds = _list(file, "token_type", int)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    is_whole = len(set(tokens)) == len(tokens) == len(kinds)
    if not is_whole or any(len(pair) != 2 for pair in pairs):
        raise _bad_tokenizer(file, "tokens, their types and merges are not those of one tokenizer")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises Exception itself
        raise _bad_tokenizer(file, str(error)) from None
    return _complete(file, made, list(zip(tokens, kinds, strict=True)))


def _complete(file: File, made: Any, tokens: list[tuple[str, int]]) -> str:
    """A tokenizer's file, from what merges pairs and from all tokens with their types."""
    from tokenizers import (  # pyright: ignore[reportMissingImports]
        AddedToken,
        decoders,
        pre_tokenizers,
        processors,
    )

    cut: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _DIGITS_ALONE[file.metadata[_TOKENIZER + "pre"]]:
        cut.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(cut)
    made.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, made.add_special_tokens), (_USER_DEFINED, made.add_tokens)):
        add([AddedToken(token, normalized=False) for token, its in tokens if its == kind])
    begin = special_tokens(file).get("bos_token")
    if file.metadata.get(_TOKENIZER + "add_bos_token") is True and begin is not None:
        number = file.metadata[_TOKENIZER + "bos_token_id"]
        made.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, number)]
        )
    return made.to_str(pretty=True)


def special_tokens(file: File) -> dict[str, str]:
    """The tokens with a meaning, by their names in a `tokenizer_config.json`."""
    tokens = _list(file, "tokens", str)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    numbers = {t: file.metadata.get(f"{_TOKENIZER}{ours}_token_id") for ours, t in names.items()}
    return {
        f"{name}_token": tokens[number]
        for name, number in numbers.items()
        if isinstance(number, int) and 0 <= number < len(tokens)
    }


def tokenizer_config_json(file: File) -> dict[str, Any]:
    """Facts that `transformers` needs beside a `tokenizer.json`: special tokens and the chat."""
    chat = file.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens(file),
        **({"chat_template": chat} if isinstance(chat, str) else {}),
    }


def _list(file: File, key: str, kind: type) -> list[Any]:
    """A list of metadata of the tokenizer, all of whose members have a type."""
    values = file.metadata.get(_TOKENIZER + key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise _bad_tokenizer(file, f"{_TOKENIZER}{key} is no list of {kind.__name__}")
    return values


def _bad_tokenizer(file: File, why: str) -> ValueError:
    return ValueError(f"{file.path} has no tokenizer that can be rebuilt: {why}. {_INSTEAD}")
