import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from models.configs import CONFIGS, Config
from models.extras.moe import Experts, room
from models.train import Trainer
from tests.python.models.conftest import SCHEDULE, assert_close, loss_and_gradients
from tests.python.models.hlo_groups import collectives

# Room for all tokens in every expert.
FOUR = dataclasses.replace(CONFIGS["tiny"], experts=4, capacity_factor=4.0)
TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, FOUR.vocab)


def f64(x: Any) -> Any:
    return np.asarray(x, np.float64)


def naive_experts(layer: Experts, x: jax.Array, config: Config) -> np.ndarray:
    """Token by token and choice by choice, in float64; first choices take room first."""
    tokens = f64(x).reshape(-1, config.embed)
    scores = np.exp(tokens @ f64(layer.router.kernel[...]))
    weights = scores / scores.sum(-1, keepdims=True)
    order = np.argsort(-weights, axis=-1)[:, : config.experts_per_token]
    left = np.full(config.experts, room(config, len(tokens)))
    gate, up, down = (f64(p[...]) for p in (layer.gate, layer.up, layer.down))
    result = np.zeros_like(tokens)
    for choice in range(config.experts_per_token):
        for token, expert in enumerate(order[:, choice]):
            left[expert] -= 1
            if left[expert] < 0:
                continue
            y, z = tokens[token] @ gate[expert], tokens[token] @ up[expert]
            result[token] += weights[token, expert] * (y / (1 + np.exp(-y)) * z) @ down[expert]
    return result.reshape(x.shape)


@pytest.mark.parametrize(("per_token", "factor"), [(1, 4.0), (2, 4.0), (1, 0.75), (3, 0.5)])
def test_experts_equal_naive_experts(per_token, factor):
    config = dataclasses.replace(FOUR, experts_per_token=per_token, capacity_factor=factor)
    layer = Experts(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 7, config.embed))
    expected = naive_experts(layer, x, config)
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(layer(x), expected, rtol=1e-3, atol=1e-7)


def test_room_is_the_even_share_times_the_factor_rounded_up():
    config = dataclasses.replace(FOUR, experts_per_token=2, capacity_factor=1.25)
    assert [room(config, tokens) for tokens in (1, 8, 9)] == [1, 5, 6]


@pytest.mark.parametrize(
    "mesh",
    [{"expert": 2, "model": 2}, pytest.param({"fsdp": 2, "expert": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh, make_mesh, fast_jit):
    (expected_loss, expected), (loss, grads) = (
        loss_and_gradients(Trainer(FOUR, SCHEDULE, make_mesh(**axes)), TOKENS, fast_jit)
        for axes in ({"data": 1}, mesh)
    )
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(grads, expected)


def test_tokens_cross_by_all_to_all_and_experts_stay(make_mesh, fast_jit):
    mesh = make_mesh(expert=4)
    trainer = Trainer(FOUR, SCHEDULE, mesh)
    state = trainer.state_shardings()
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: trainer.init(3).params),
            state.params,
        )
        step = fast_jit(jax.value_and_grad(trainer.loss), out_shardings=(None, state.params))
        joined = list(collectives(step.lower(params, TOKENS).compile().as_text()))
    names = [name for name, _ in joined]
    assert names.count("all-to-all") == 4  # there and back, forward and backward
    assert set(names) == {"all-to-all", "all-reduce"}


def test_config_that_does_not_fit_says_what_to_change():
    with pytest.raises(ValueError, match="can't go to 5 of 4 experts: make experts_per_token"):
        dataclasses.replace(FOUR, experts_per_token=5)
