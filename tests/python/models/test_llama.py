import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from models.configs import CONFIGS
from models.extras.accumulate import Accumulation
from models.llama import Llama
from models.sharding import PARAMETERS, path_name
from models.train import Trainer
from tests.python.models.conftest import SCHEDULE, assert_close, loss_and_gradients

TINY = CONFIGS["tiny"]


def random_tokens(batch: int, positions: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (batch, positions), 0, TINY.vocab)


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    state = nnx.state(nnx.eval_shape(lambda: Llama(CONFIGS[name], rngs=nnx.Rngs(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {path_name(path): leaf.shape for path, leaf in leaves}


# A row for each combination of a config's features.
KINDS = ("tiny", "moe", "qwen2-7b", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", KINDS)
def test_sharding_table_has_a_row_for_every_parameter(name):
    for key, shape in shapes(name).items():
        assert len(PARAMETERS[key]) == len(shape)


def test_sharding_table_has_no_other_row():
    assert PARAMETERS.keys() == set().union(*(shapes(name) for name in KINDS))


def test_parameters_and_moments_have_the_types_of_their_options(make_mesh, fast_jit):
    config = dataclasses.replace(TINY, param_dtype="bfloat16", logits_dtype="float32")
    schedule = dataclasses.replace(SCHEDULE, dtype="bfloat16")
    trainer = Trainer(config, schedule, make_mesh(data=1))
    init, step = trainer.compile(fast_jit)
    state, _ = step(init(0), random_tokens(2, 17))
    moments = state.optimizer[1][0]
    for leaf in jax.tree.leaves((state.params, moments.mu, moments.nu)):
        assert leaf.dtype == jnp.bfloat16
    assert moments.count.dtype == jnp.int32


def test_step_reuses_the_memory_of_its_state(make_mesh, fast_jit):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(data=1))
    lowered = trainer.lower(fast_jit, 2, 16)
    state, tokens = lowered.args_info[0]
    assert all(info.donated for info in jax.tree.leaves(state))
    assert not tokens.donated


@pytest.mark.parametrize(
    ("change", "mesh"),
    [
        ({}, {"fsdp": 2, "model": 2}),
        ({"loss_chunk": 4, "qk_norm": True, "remat": "full"}, {"data": 4}),
        ({"qkv_bias": True, "tied": True, "loss_chunk": 0}, {"data": 2, "sequence": 2}),
        ({"experts": 4}, {"expert": 2, "data": 2}),
        ({}, {"stage": 2, "data": 2}),
    ],
    ids=str,
)
def test_step_in_float64_has_no_array_of_narrower_floats(change, mesh, make_mesh, fast_jit, x64):
    in_float64 = {"dtype": "float64", "param_dtype": "float64", "logits_dtype": "float64"}
    config = dataclasses.replace(TINY, **in_float64, **change)
    schedule = dataclasses.replace(SCHEDULE, dtype="float64")
    parts = 1 if "stage" in mesh else 2
    trainer = Trainer(config, schedule, make_mesh(**mesh), accumulation=Accumulation(parts))
    text = trainer.lower(fast_jit, 16, 16).as_text()
    assert "xf64>" in text
    assert not re.findall(r"xb?f(?:16|32)>", text)


@pytest.mark.parametrize("name", ["dtype", "param_dtype", "logits_dtype"])
def test_float64_without_64_bit_types_is_refused(name):
    with pytest.raises(ValueError, match="float64 needs JAX's 64-bit types: set JAX_ENABLE_X64=1"):
        dataclasses.replace(TINY, **{name: "float64"})
    with pytest.raises(ValueError, match="set JAX_ENABLE_X64=1"):
        dataclasses.replace(SCHEDULE, dtype="float64")


@pytest.mark.parametrize(
    "change",
    [
        {"scan": False},
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
        pytest.param({"remat": "dots"}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_do_not_depend_on_how_layers_are_run(change, make_mesh):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(data=1))
    other = dataclasses.replace(trainer, config=dataclasses.replace(TINY, **change))
    expected, actual = (loss_and_gradients(t, random_tokens(2, 17)) for t in (trainer, other))
    assert_close(actual, expected, rtol=1e-4)


@pytest.mark.parametrize(("remat", "forward"), [("none", 1), ("dots", 1), ("full", 2)])
def test_backward_pass_computes_cudnn_attention_again_only_with_full_remat(
    remat: str, forward: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_200)
    config = dataclasses.replace(
        CONFIGS["tiny"], dtype="bfloat16", attention="cudnn", remat=remat, scan=True
    )
    graph, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return model.loss(model.stack(model.inputs(tokens)), tokens)

    program = str(jax.make_jaxpr(jax.grad(loss))(params, jax.ShapeDtypeStruct((2, 64), jnp.int32)))
    assert program.count("= dot_product_attention_fwd_wrapper") == forward
    assert program.count("= dot_product_attention_bwd_wrapper") == 1


def test_training_learns_one_batch(make_mesh, fast_jit):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(data=1))
    init, step = trainer.compile(fast_jit)
    state, tokens = init(0), random_tokens(2, 17)
    losses = []
    for _ in range(30):
        state, measures = step(state, tokens)
        losses.append(float(measures["loss"]))
    assert losses[-1] < losses[0] / 2
    assert int(state.step) == 30


def test_config_that_does_not_fit_says_what_to_change():
    tiny = CONFIGS["tiny"]
    with pytest.raises(ValueError, match="make query_heads a multiple of kv_heads"):
        dataclasses.replace(tiny, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        dataclasses.replace(tiny, head_dim=7)
    with pytest.raises(ValueError, match="not one of float32, bfloat16, float16"):
        dataclasses.replace(tiny, dtype="float8")
