import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.configs import CONFIGS
from models.loss import Head, cross_entropy
from models.train import Trainer
from tests.python.models.conftest import SCHEDULE, loss_and_gradients
from tests.python.models.hlo_groups import collectives

# A chunk that does not divide the positions, and layers without a loop of their own.
CHUNKED = dataclasses.replace(CONFIGS["tiny"], loss_chunk=6, scan=False)


def of_head(head: Head, positions: int):
    x = jax.random.normal(jax.random.key(0), (3, positions, 8)).astype(head.dtype)
    kernel = jax.random.normal(jax.random.key(1), (8, 50)).astype(head.dtype)
    labels = jax.random.randint(jax.random.key(2), (3, positions), 0, 50)
    by = jax.value_and_grad(lambda x, k: 3 * cross_entropy(head, x, k, labels), argnums=(0, 1))
    return jax.jit(by)(x, kernel)


@pytest.mark.parametrize(("positions", "chunk"), [(7, 1), (7, 3), (8, 4), (1, 4)])
def test_chunked_loss_equals_the_whole_one(positions, chunk):
    whole = of_head(Head(jnp.float32), positions)
    chunked = of_head(Head(jnp.float32, chunk), positions)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), chunked, whole
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_chunked_gradients_have_the_type_of_what_they_belong_to(dtype):
    whole, chunked = (of_head(Head(dtype, chunk), 9) for chunk in (0, 4))
    assert [x.dtype for x in chunked[1]] == [dtype, dtype]
    np.testing.assert_allclose(chunked[0], whole[0], rtol=1e-6)
    for ours, theirs in zip(chunked[1], whole[1], strict=True):
        difference = jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32))
        assert difference.max() <= 2 * jnp.finfo(dtype).eps * jnp.abs(theirs).max()


def test_no_array_has_the_logits_of_all_positions():
    x, kernel = jnp.zeros((3, 64, 8)), jnp.zeros((8, 50))
    labels = jnp.zeros((3, 64), jnp.int32)

    def logits(chunk: int) -> set[str]:
        head = Head(jnp.float32, chunk)
        by = jax.grad(lambda x, kernel: cross_entropy(head, x, kernel, labels), (0, 1))
        return set(re.findall(r"f32\[([\d,]*,50)\]", str(jax.make_jaxpr(by)(x, kernel))))

    assert "3,64,50" in logits(0)
    assert logits(16) == {"3,16,50", "8,50"}


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"data": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "model": 2}, marks=pytest.mark.slow),
        {"fsdp": 4},
    ],
    ids=str,
)
def test_chunks_on_a_mesh_exchange_nothing_over_the_batch(axes, make_mesh, fast_jit):
    trainer = Trainer(CHUNKED, SCHEDULE, make_mesh(**axes))
    text = trainer.lower(fast_jit, 8, 16).compile().as_text()
    assert " while(" in text
    inner = axes.get("model", 1)
    for _, groups in collectives(text, in_loops=True):
        assert all(len({device // inner for device in group}) == 1 for group in groups)
    whole = dataclasses.replace(trainer, config=dataclasses.replace(CHUNKED, loss_chunk=0))
    expected = {name for name, _ in collectives(whole.lower(fast_jit, 8, 16).compile().as_text())}
    assert {name for name, _ in collectives(text)} == expected


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "model": 2},
        pytest.param({"fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chunked_loss_on_a_mesh_is_that_of_one_device(axes, make_mesh, fast_jit):
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)
    whole = dataclasses.replace(CHUNKED, loss_chunk=0)
    (expected_loss, expected), (loss, gradients) = (
        loss_and_gradients(Trainer(config, SCHEDULE, make_mesh(**sizes)), tokens, fast_jit)
        for config, sizes in ((whole, {"data": 1}), (CHUNKED, axes))
    )
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    heads = [tree["head"]["kernel"] for tree in (gradients, expected)]
    np.testing.assert_allclose(*heads, rtol=1e-3, atol=1e-6)
