import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.configs import CONFIGS
from models.extras.accumulate import Accumulation
from models.train import FINAL_RATE, Schedule, Trainer
from tests.python.models.conftest import SCHEDULE, assert_close
from tests.python.models.hlo_groups import collectives

TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, CONFIGS["tiny"].vocab)


@pytest.mark.parametrize(
    ("axes", "manual", "chunk"),
    [
        pytest.param({"data": 2}, ("data",), 0, marks=pytest.mark.slow),
        ({"data": 2, "fsdp": 2}, ("data",), 6),
    ],
    ids=str,
)
def test_parts_have_the_gradients_of_the_whole_and_are_summed_once(
    axes, manual, chunk, make_mesh, fast_jit
):
    mesh = make_mesh(**axes)
    trainer = Trainer(dataclasses.replace(CONFIGS["tiny"], loss_chunk=chunk), SCHEDULE, mesh)
    accumulation = Accumulation(2, manual)
    with jax.set_mesh(mesh):
        params = fast_jit(
            lambda: trainer.init(3).params, out_shardings=trainer.state_shardings().params
        )()
        whole = fast_jit(jax.value_and_grad(trainer.loss))(params, TOKENS)
        parts = fast_jit(lambda p, t: accumulation.value_and_grad(trainer.loss, p, t))
        parts = parts.lower(params, TOKENS).compile()
        summed = parts(params, TOKENS)
    assert float(summed[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    assert_close(summed[1], whole[1])
    text = parts.as_text()
    assert "all-reduce" in {name for name, _ in collectives(text)}
    in_loops = [groups for _, groups in collectives(text, in_loops=True)]
    across = [groups for groups in in_loops if _joins(groups, mesh, "data")]
    assert not across, "a part's gradients cross `data`"


def test_batch_that_does_not_fit_says_what_to_change(make_mesh):
    with (
        jax.set_mesh(make_mesh(data=2)),
        pytest.raises(ValueError, match=r"8 can't be divided into 3 parts.*choose a multiple of 6"),
    ):
        Accumulation(3, ("data",)).value_and_grad(lambda p, t: t.sum(), {}, TOKENS)


def _joins(groups: list[list[int]], mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Whether a group has devices at different places of a mesh axis."""
    places = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)].ravel()
    return any(len({int(places[device]) for device in group}) > 1 for group in groups)


def test_warm_up_has_equal_bits_with_and_without_fused_multiply_add():
    """Unlike islands have equal learning rates: FMA changes sums of products only."""
    schedule = Schedule(1e-4, 5, 0.1, 1.0)
    text = jax.jit(schedule.rate).lower(jax.ShapeDtypeStruct((), jnp.int32)).as_text()
    assert "stablehlo.multiply" in text
    assert not re.findall(r"stablehlo\.(?:add|subtract)", text)
    rates = [float(schedule.rate(step)) for step in range(1, 8)]
    expected = np.float32(1e-4) * (np.array([1, 2, 3, 4, 5, 5, 5], np.float32) / np.float32(5))
    assert rates == expected.tolist()


def test_cosine_falls_to_a_part_of_the_rate():
    schedule = Schedule(1e-2, 10, 0.1, 1.0, cosine_steps=110)
    rates = [float(schedule.rate(step)) for step in (1, 5, 10, 60, 110, 1000)]
    middle = (1 + FINAL_RATE) / 2
    expected = np.array([0.1, 0.5, 1, middle, FINAL_RATE, FINAL_RATE]) * 1e-2
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
