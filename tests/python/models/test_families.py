import dataclasses
import json
from typing import Any

import pytest

from models.configs import CONFIGS, RopeScaling
from models.extras.families import FAMILIES, config_from, config_to, family_of
from tests.python.models.golden_models import GOLDEN

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
}
NAMED = [
    name for name in CONFIGS if name.startswith(("llama", "qwen")) or name in ("1b", "8b", "tiny")
]


def test_published_config_is_the_named_one():
    named = dataclasses.replace(CONFIGS["llama-3.2-1b"], remat="none")
    assert config_from(LLAMA) == dataclasses.replace(named, param_dtype="bfloat16")


def test_both_forms_of_rotary_settings_are_read():
    new: dict[str, Any] = {
        k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")
    }
    new["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = new.pop("torch_dtype")
    assert config_from(new) == config_from(LLAMA)


@pytest.mark.parametrize("name", NAMED)
def test_config_is_the_same_there_and_back(name):
    theirs = json.loads(json.dumps(config_to(CONFIGS[name])))
    kept: dict[str, Any] = {"remat": CONFIGS[name].remat, "dtype": CONFIGS[name].dtype}
    kept["loss_chunk"] = CONFIGS[name].loss_chunk
    assert dataclasses.replace(config_from(theirs), **kept) == CONFIGS[name]
    assert theirs["architectures"] == [FAMILIES[theirs["model_type"]].architecture]


def test_export_keeps_what_the_config_does_not_say():
    like = {**LLAMA, "eos_token_id": 7, "max_position_embeddings": 99}
    theirs = config_to(config_from(like), like)
    assert (theirs["eos_token_id"], theirs["max_position_embeddings"]) == (7, 99)


def test_config_of_golden_models_has_their_scaling_and_experts():
    read = {
        name: config_from(json.loads((GOLDEN / name / "config.json").read_text()))
        for name in ("llama-3.1", "qwen3-moe")
    }
    assert read["llama-3.1"].rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    assert (read["qwen3-moe"].experts, read["qwen3-moe"].hidden) == (4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "mixtral"},
            "model_type 'mixtral' can't be represented: known ones are llama",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling 'yarn'.*llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'factor'.*low_freq_factor"),
        ({"attention_bias": True}, "attention_bias True .*no family has a bias"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .*SwiGLU"),
        ({"sliding_window": 4096}, "sliding_window 4096 .*sees all earlier"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types.*sliding_attention",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config .*isn't quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_experts": 8}, "num_experts 8 .*nothing is known of this key"),
        ({"model_type": "qwen3_moe"}, "no moe_intermediate_size"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"torch_dtype": "float8"}, "dtype 'float8' .*known ones are float32"),
    ],
    ids=str,
)
def test_model_that_the_layers_do_not_compute_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        config_from({**LLAMA, **change})


def test_unused_sliding_window_is_read():
    config_from({**LLAMA, "model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False})


def test_model_of_no_family_is_refused():
    with pytest.raises(ValueError, match="no family has qkv_bias=False, qk_norm=False, experts=8"):
        family_of(CONFIGS["moe"])
