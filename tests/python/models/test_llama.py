import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.configs import CONFIGS, DTYPES
from models.llama import Llama
from models.sharding import PARAMETERS, path_name
from models.train import Schedule, Trainer

TINY = CONFIGS["tiny"]
SCHEDULE = Schedule(learning_rate=1e-2, warmup=2, weight_decay=0.1, max_gradient_norm=1.0)


def random_tokens(batch: int, positions: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (batch, positions), 0, TINY.vocab)


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    state = nnx.state(nnx.eval_shape(lambda: Llama(CONFIGS[name], rngs=nnx.Rngs(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return {path_name(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("name", CONFIGS)
def test_sharding_table_has_a_row_for_every_parameter_and_no_other(name):
    used = {
        key: spec for key, spec in PARAMETERS.items() if CONFIGS[name].experts or "/moe/" not in key
    }
    assert {key: len(shape) for key, shape in shapes(name).items()} == {
        key: len(spec) for key, spec in used.items()
    }


@pytest.mark.parametrize(("name", "billions"), [("1b", 0.97), ("8b", 6.98)])
def test_large_configs_have_the_parameters_of_llama_without_its_vocabulary(name, billions):
    count = sum(math.prod(shape) for shape in shapes(name).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_float32_of_batch_positions_vocab(dtype):
    model = Llama(dataclasses.replace(TINY, dtype=dtype), rngs=nnx.Rngs(0))
    logits = model(random_tokens(3, 7))
    assert (logits.shape, logits.dtype) == ((3, 7, TINY.vocab), jnp.float32)


def test_loss_at_the_start_is_that_of_guessing(make_mesh):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(data=1))
    loss = trainer.loss(trainer.init(0).params, random_tokens(4, 33))
    assert loss == pytest.approx(math.log(TINY.vocab), abs=0.05)


def test_logits_do_not_depend_on_later_tokens():
    model = Llama(TINY, rngs=nnx.Rngs(0))
    tokens = random_tokens(2, 9)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % TINY.vocab)
    before, after = model(tokens), model(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).max() > 1e-4


@pytest.mark.parametrize("change", [{"scan": False}, {"remat": True}])
def test_loss_and_gradients_do_not_depend_on_how_layers_are_run(change, make_mesh):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(data=1))
    other = dataclasses.replace(trainer, config=dataclasses.replace(TINY, **change))
    params, tokens = trainer.init(0).params, random_tokens(2, 17)
    expected, actual = (
        jax.jit(jax.value_and_grad(t.loss))(params, tokens) for t in (trainer, other)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, expected
    )


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
