import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from models.configs import CONFIGS
from models.data import Batches
from models.extras.corpus import open_corpus
from models.sharding import activation_sharding, parameter_shardings
from models.train import Trainer
from tests.python.models.conftest import SCHEDULE
from tests.python.models.hlo_groups import collectives

TINY = CONFIGS["tiny"]


def step_text(trainer: Trainer, jit: Callable[..., Any], batch: int) -> str:
    """The optimized program of a training step on the trainer's mesh."""
    return trainer.lower(jit, batch, 16).compile().as_text()


@pytest.mark.parametrize(
    "change",
    [
        {},
        pytest.param({"scan": False}, marks=pytest.mark.slow),
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16"},
        pytest.param({"dtype": "float16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_only_all_reduces_cross_the_data_axis(change, make_mesh, fast_jit):
    trainer = Trainer(dataclasses.replace(TINY, **change), SCHEDULE, make_mesh(data=2, model=2))
    crossing = {
        name
        for name, joined in collectives(step_text(trainer, fast_jit, batch=4))
        if any(len({device // 2 for device in group}) > 1 for group in joined)
    }
    assert crossing == {"all-reduce"}


@pytest.mark.parametrize(
    "axes", [pytest.param({"data": 4}, marks=pytest.mark.slow), {"data": 3, "model": 1}]
)
def test_a_data_parallel_step_has_only_all_reduces(axes, make_mesh, fast_jit):
    trainer = Trainer(TINY, SCHEDULE, make_mesh(**axes))
    names = {name for name, _ in collectives(step_text(trainer, fast_jit, batch=12))}
    assert names == {"all-reduce"}


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fully_sharded_step_gathers_parameters_and_moves_no_activation(scan, make_mesh, fast_jit):
    config = dataclasses.replace(TINY, scan=scan)
    text = step_text(Trainer(config, SCHEDULE, make_mesh(fsdp=4)), fast_jit, batch=8)
    assert {name for name, _ in collectives(text)} == {"all-gather", "all-reduce"}
    assert "[8,16," not in "".join(line for line in text.splitlines() if " all-gather(" in line)


def test_init_has_no_collective(make_mesh, fast_jit):
    init, _ = Trainer(TINY, SCHEDULE, make_mesh(data=2, model=2)).compile(fast_jit)
    assert not list(collectives(init.lower(0).compile().as_text()))


def test_start_and_losses_do_not_depend_on_the_mesh(make_mesh, fast_jit):
    runs = []
    for axes in ({"data": 1}, {"fsdp": 2, "model": 2}):
        trainer = Trainer(TINY, SCHEDULE, make_mesh(**axes))
        batches = Batches(open_corpus(), 0, 4, 16)
        with jax.set_mesh(trainer.mesh):
            init, step = trainer.compile(fast_jit)
            state = init(3)
            start = jax.tree.map(np.asarray, state.params)
            losses = []
            for index in range(2):
                tokens = batches(index, activation_sharding("tokens", trainer.mesh))
                state, measures = step(state, tokens)
                losses.append(float(measures["loss"]))
        runs.append((start, losses))
    for start, losses in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, start, runs[0][0])
        np.testing.assert_allclose(losses, runs[0][1], rtol=1e-5)


def test_moments_lie_like_their_parameters(make_mesh):
    shardings = Trainer(TINY, SCHEDULE, make_mesh(data=2, model=2)).state_shardings()
    moments = shardings.optimizer[1][0]
    assert moments.mu == moments.nu == shardings.params
    assert moments.count.is_fully_replicated


def test_mesh_that_does_not_fit_says_what_to_change(make_mesh):
    with pytest.raises(ValueError, match="not a multiple; choose a mesh with a smaller model axis"):
        Trainer(TINY, SCHEDULE, make_mesh(data=1, model=4)).state_shardings()


def test_unknown_parameter_says_where_to_add_it(make_mesh):
    with pytest.raises(ValueError, match=r"parameter a/b has no row in models\.sharding\.PARAM"):
        parameter_shardings({"a": {"b": np.zeros(2)}}, make_mesh(data=2))
