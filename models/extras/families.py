"""The families of models: their flags, and Hugging Face's names. Three tables.

A family is a set of flags of `Config`; its layers, sizes and names are otherwise one.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from models.configs import DTYPES, Config, RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type` of Hugging Face: its class, and which flags of `Config` its models have."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    routed: bool = False

    def has(self, config: Config) -> bool:
        """Whether a model of that shape is one of the family."""
        flags = (config.qkv_bias, config.qk_norm, bool(config.experts))
        is_plain = config.shared_mlp != bool(config.experts)
        return flags == (self.qkv_bias, self.qk_norm, self.routed) and is_plain


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, routed=True),
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of ours and the tensors that it is made of.

    `axes` names the axes of a tensor and, behind the arrow, of the parameter; axes in parentheses
    are one in the tensor. The parameter's first axes are the numbers in the tensor's name.
    """

    ours: str
    theirs: str
    axes: str

    @property
    def numbers(self) -> int:
        """Count of numbers in a tensor's name."""
        return self.theirs.count("{")


def _layer(ours: str, theirs: str, axes: str) -> Weight:
    return Weight(f"blocks/{ours}", f"model.layers.{{}}.{theirs}", axes)


# Names of all families; a model has the names of its own parameters.
WEIGHTS = (
    Weight("embed/embedding", "model.embed_tokens.weight", "v e -> v e"),
    _layer("attention_norm/scale", "input_layernorm.weight", "e -> e"),
    _layer("attention/query/kernel", "self_attn.q_proj.weight", "(h d) e -> e h d"),
    _layer("attention/key/kernel", "self_attn.k_proj.weight", "(h d) e -> e h d"),
    _layer("attention/value/kernel", "self_attn.v_proj.weight", "(h d) e -> e h d"),
    _layer("attention/query/bias", "self_attn.q_proj.bias", "(h d) -> h d"),
    _layer("attention/key/bias", "self_attn.k_proj.bias", "(h d) -> h d"),
    _layer("attention/value/bias", "self_attn.v_proj.bias", "(h d) -> h d"),
    _layer("attention/query_norm/scale", "self_attn.q_norm.weight", "d -> d"),
    _layer("attention/key_norm/scale", "self_attn.k_norm.weight", "d -> d"),
    _layer("attention/out/kernel", "self_attn.o_proj.weight", "e (h d) -> h d e"),
    _layer("mlp_norm/scale", "post_attention_layernorm.weight", "e -> e"),
    _layer("mlp/gate/kernel", "mlp.gate_proj.weight", "f e -> e f"),
    _layer("mlp/up/kernel", "mlp.up_proj.weight", "f e -> e f"),
    _layer("mlp/down/kernel", "mlp.down_proj.weight", "e f -> f e"),
    _layer("moe/router/kernel", "mlp.gate.weight", "x e -> e x"),
    _layer("moe/gate", "mlp.experts.{}.gate_proj.weight", "f e -> e f"),
    _layer("moe/up", "mlp.experts.{}.up_proj.weight", "f e -> e f"),
    _layer("moe/down", "mlp.experts.{}.down_proj.weight", "e f -> f e"),
    Weight("final_norm/scale", "model.norm.weight", "e -> e"),
    Weight("head/kernel", "lm_head.weight", "v e -> e v"),
)

_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "query_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
_ROUTED_SIZES = {
    "moe_intermediate_size": "hidden",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalize_experts",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}
_ALIASES = {"num_local_experts": "num_experts", "torch_dtype": "dtype"}
# Values that `transformers` uses for an absent key, in every family.
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "norm_topk_prob": False}

# Keys that have one value that we can represent; any other one is refused.
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the feed-forward layer is SwiGLU"),
    "attention_bias": (False, "no family has a bias on attention's output"),
    "mlp_bias": (False, "feed-forward layers have no bias"),
    "attention_dropout": (0.0, "there is no dropout"),
    "use_sliding_window": (False, "every position sees all earlier ones"),
    "partial_rotary_factor": (1.0, "all of a head is rotated"),
    "decoder_sparse_step": (1, "all layers have experts, or none has"),
    "mlp_only_layers": ([], "all layers have experts, or none has"),
    "quantization_config": (None, "weights are floats; take a checkpoint that isn't quantized"),
}
# Keys that do not change the results of a model.
_IGNORED = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def family_of(config: Config) -> str:
    """The `model_type` of a model of that shape.

    Raises:
      ValueError: No family has such models.
    """
    for name, family in FAMILIES.items():
        if family.has(config):
            return name
    raise ValueError(
        f"no family has qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm}, "
        f"experts={config.experts} and shared_mlp={config.shared_mlp} together: "
        f"choose the flags of {', '.join(FAMILIES)}."
    )


def config_from(theirs: Mapping[str, Any]) -> Config:
    """The config of a `config.json`, with the types of its weights; `replace` them as needed.

    Raises:
      ValueError: The layers do not compute such a model. The text names the key.
    """
    model_type = theirs.get("model_type")
    if model_type not in FAMILIES:
        raise _refusal("model_type", model_type, f"known ones are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    given = {_ALIASES.get(key, key): value for key, value in theirs.items()}
    sizes = {**_SIZES, **_ROUTED_SIZES} if family.routed else _SIZES
    _check(given, sizes)
    given = {**_DEFAULTS, **given}
    given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
    if given.get("head_dim") is None and "hidden_size" in given:
        given["head_dim"] = given["hidden_size"] // given.get("num_attention_heads", 1)
    fields = {}
    for key, field in sizes.items():
        if given.get(key) is None:
            raise ValueError(f"config.json has no {key}: take the one that belongs to the weights.")
        fields[field] = given[key]
    theta, scaling = _rope(given)
    dtype = given.get("dtype") or "float32"
    if dtype not in DTYPES:
        raise _refusal("dtype", dtype, f"known ones are {', '.join(DTYPES)}")
    if family.routed:
        fields |= {"shared_mlp": False, "capacity_factor": float("inf")}
    return Config(
        **fields,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        dtype=dtype,
        param_dtype=dtype,
    )


def config_to(config: Config, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` of a model. Keys that `Config` has no field for are taken from `like`."""
    name = family_of(config)
    others = {k: v for k, v in (like or {}).items() if k in _IGNORED or k in _FIXED}
    sizes = {**_SIZES, **_ROUTED_SIZES} if config.experts else _SIZES
    scaling: dict[str, Any] | None = None
    if config.rope_scaling:
        scaling = {key: getattr(config.rope_scaling, field) for key, field in _SCALING.items()}
        scaling["rope_type"] = "llama3"
    others.pop("dtype", None)
    return {
        **others,
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        "hidden_act": "silu",
        **{key: getattr(config, field) for key, field in sizes.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "torch_dtype": config.param_dtype,
    }


def _rope(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions, in the form of any version of `transformers`."""
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    theta = float(rope.pop("rope_theta", None) or given.get("rope_theta") or 10_000.0)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    names = _SCALING if kind == "llama3" else {}
    if kind not in ("default", "llama3"):
        raise _refusal("rope_scaling", kind, "known types are default and llama3")
    if rope.keys() != names.keys():
        keys = ", ".join(sorted(rope)) or "nothing"
        raise _refusal("rope_scaling", keys, f"{kind} has {', '.join(names) or 'nothing'}")
    scaling = {field: rope[key] for key, field in names.items()}
    return theta, RopeScaling(**scaling) if scaling else None


def _check(given: Mapping[str, Any], sizes: Mapping[str, str]) -> None:
    """Refuses values that the layers don't compute, and unknown keys."""
    for key, (value, why) in _FIXED.items():
        if given.get(key) not in (None, value):
            raise _refusal(key, given[key], why)
    if given.get("sliding_window") and given.get("use_sliding_window") is not False:
        raise _refusal("sliding_window", given["sliding_window"], _FIXED["use_sliding_window"][1])
    others = set(given.get("layer_types") or ()) - {"full_attention"}
    if others:
        raise _refusal("layer_types", sorted(others), "every position sees all earlier ones")
    known = {*sizes, *_FIXED, *_IGNORED, *_ROPE, "model_type", "sliding_window", "layer_types"}
    for key in sorted(given.keys() - known):
        raise _refusal(
            key, given[key], "nothing is known of this key; remove it if it has no effect"
        )


def _refusal(key: str, value: Any, why: str) -> ValueError:
    return ValueError(f"config.json: {key} {value!r} can't be represented: {why}.")


def tensor_names(weight: Weight, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of the tensors that form a parameter of that shape, each with its index in it."""
    for place in np.ndindex(shape[: weight.numbers]):
        yield weight.theirs.format(*place), place
