import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import pretrain
from models.configs import CONFIGS, Config
from models.extras import staged
from models.extras.first_rows import FirstRows, run_first
from models.extras.pipeline import Pipeline
from models.extras.records import METRICS, read_rows
from models.llama import Llama
from models.train import Params, Trainer
from tests.python.models.conftest import SCHEDULE, assert_close, loss_and_gradients
from tests.python.models.hlo_groups import collectives

FOUR = dataclasses.replace(CONFIGS["tiny"], layers=4)
TOKENS = jax.random.randint(jax.random.key(1), (8, 17), 0, FOUR.vocab)


def gradients(jit, mesh: jax.sharding.Mesh, config: Config) -> tuple[float, Params]:
    trainer = Trainer(config, SCHEDULE, mesh)
    return loss_and_gradients(trainer, TOKENS, jit, trainer.value_and_grad)


@functools.cache
def whole(tied: bool = False) -> tuple[float, Params]:
    """Loss and gradients without a pipeline."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return gradients(jax.jit, mesh, dataclasses.replace(FOUR, tied=tied))


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        pytest.param({"stage": 4}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2, "data": 2},
            {"stages": (3, 1), "microbatches": 2},
            marks=pytest.mark.slow,
        ),
        ({"stage": 2, "data": 2}, {"stages": (1, 3), "microbatches": 2, "tied": True}),
        pytest.param(
            {"stage": 2, "model": 2},
            {"stages": (1, 3), "scan": False, "remat": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 2, "fsdp": 2}, {"stages": (1, 3), "microbatches": 1}, marks=pytest.mark.slow
        ),
        (
            {"stage": 2, "data": 2},
            {"stages": (3, 1), "tied": True, "pipeline": "1f1b"},
        ),
        pytest.param({"stage": 4}, {"microbatches": 8, "pipeline": "1f1b"}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2, "model": 2},
            {"stages": (1, 3), "remat": "full", "pipeline": "1f1b"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"stage": 2, "fsdp": 2},
            {"microbatches": 1, "scan": False, "pipeline": "1f1b"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_without_stages(axes, changes, make_mesh, fast_jit):
    mesh, config = make_mesh(**axes), dataclasses.replace(FOUR, **changes)
    loss, grads = gradients(fast_jit, mesh, config)
    expected_loss, expected = whole(config.tied)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    pipeline = Pipeline.on(mesh, config)
    assert pipeline is not None
    expected = expected | {"blocks": pipeline.spread(expected["blocks"])}
    assert_close(grads, expected)


def test_1f1b_keeps_few_microbatches_however_many_there_are(make_mesh, fast_jit):
    mesh = make_mesh(stage=2)

    def temporary(microbatches: int, **changes: str) -> int:
        config = dataclasses.replace(FOUR, microbatches=microbatches, **changes)
        program = Trainer(config, SCHEDULE, mesh).lower(fast_jit, 4 * microbatches, 64)
        return program.compile().memory_analysis().temp_size_in_bytes

    for remat in ("none", "full"):
        few = temporary(2, remat=remat, pipeline="gpipe")
        assert temporary(16, remat=remat, pipeline="1f1b") <= few < temporary(16, remat=remat)


def test_only_permutes_move_activations_between_stages(make_mesh, fast_jit):
    mesh = make_mesh(stage=2)
    trainer = Trainer(FOUR, SCHEDULE, mesh)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(lambda: trainer.init(3).params)
        step = fast_jit(jax.value_and_grad(trainer.loss)).lower(params, TOKENS)
        text = step.compile().as_text()
    joined = list(collectives(text))
    permutes = sorted(groups for name, groups in joined if name == "collective-permute")
    assert permutes == [[[0, 1]], [[1, 0]]]
    assert {name for name, _ in joined} == {"collective-permute", "all-reduce"}
    assert "[2,16,32]" not in "".join(x for x in text.splitlines() if " all-reduce(" in x)


def test_layers_beyond_the_count_are_not_computed(fast_jit):
    config = dataclasses.replace(FOUR, layers=3)
    blocks = Trainer(config, SCHEDULE, jax.make_mesh((1,), ("data",))).init(3).params

    def loss(layers: int, first: FirstRows | None, params: Params) -> jax.Array:
        own = dataclasses.replace(config, layers=layers)
        graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(own, rngs=nnx.Rngs(0))))
        model = nnx.merge(graph, params)
        x = model.inputs(TOKENS[:, :-1])
        if first is None:
            return jnp.sum(model.stack(x).astype(jnp.float32) ** 2)
        block = nnx.graphdef(model.blocks)
        layer = jax.checkpoint(lambda own, x, _: nnx.merge(block, own)(x))
        blocks = params["blocks"]
        result: Any = run_first(layer, first, blocks, blocks, x, None)
        return jnp.sum(result[1].astype(jnp.float32) ** 2)

    def rows(keep: Any) -> Params:  # the first row of each array, and the others
        return blocks | {"blocks": jax.tree.map(keep, blocks["blocks"])}

    # Whatever is computed from NaN would be NaN, also what `where` drops forward.
    padded = rows(lambda x: x.at[1:].set(jnp.nan))
    one = FirstRows((1, 3), partial(jnp.int32, 0))
    value, grads = fast_jit(jax.value_and_grad(partial(loss, 3, one)))(padded)
    wanted, first = fast_jit(jax.value_and_grad(partial(loss, 1, None)))(rows(lambda x: x[:1]))
    assert value == pytest.approx(float(wanted), rel=1e-6)
    found, expected = grads["blocks"], first["blocks"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[0], rtol=1e-4), found, expected)
    assert all(not np.any(x[1:]) for x in jax.tree.leaves(found))


def test_number_of_layers_of_an_island_is_no_branch():
    def run(index: Any, params: jax.Array, x: jax.Array) -> jax.Array:
        rows = FirstRows((1, 3), index)
        result: Any = run_first(lambda own, x, _: jnp.sin(x @ own), rows, params, params, x, None)
        return jnp.sum(result[1])

    params, x = jnp.ones((3, 4, 4)), jnp.ones((2, 4))
    own = Pipeline((3, 1), microbatches=2, by_island=(("cpu", 3),)).rows

    def compiled(index: Any) -> str:
        return str(jax.jit(jax.grad(partial(run, index))).lower(params, x).compile().as_text())

    assert " conditional(" not in compiled(own.index)
    assert " conditional(" in compiled(partial(jax.lax.rng_uniform, 0, 2, ()))


def test_short_stages_are_filled_up_with_zeros():
    rows = Pipeline((1, 3), microbatches=4).spread(np.arange(1, 5))
    np.testing.assert_array_equal(rows, [1, 0, 0, 2, 3, 4])


@pytest.mark.parametrize(
    ("axes", "changes", "words"),
    [
        ({"stage": 3}, {}, r"4 layers can't be divided over stage=3 evenly.*\(stages\)"),
        ({"stage": 2}, {"stages": (2, 1, 1)}, r"are 3, but the mesh has stage=2"),
    ],
)
def test_stages_that_do_not_fit_say_what_to_change(axes, changes, words, make_mesh):
    with pytest.raises(ValueError, match=words):
        Pipeline.on(make_mesh(**axes), dataclasses.replace(FOUR, **changes))


@pytest.mark.parametrize(
    ("costs", "pipeline", "layers"),
    [
        ([[1, 0, 0], [3, 0, 0]], "gpipe", (3, 1)),
        ([[1, 3, 0], [1, 3, 0]], "gpipe", (2, 2)),  # all stages wait for the head
        ([[1, 0, 0], [1.5, 0, 0]], "gpipe", (2, 2)),  # 3 layers of the fast one take as long
        ([[1, 3, 0], [1, 3, 0]], "1f1b", (3, 1)),  # the last one has the head
        ([[1, 3, 3], [1, 3, 3]], "1f1b", (1, 3)),  # the first one has the embedding
    ],
)
def test_stages_follow_from_measured_times(costs, pipeline, layers):
    config = dataclasses.replace(FOUR, pipeline=pipeline)
    stages = staged.decide(config, np.array(costs, np.float32))
    assert stages.layers == layers
    assert f"stages: {layers[0]},{layers[1]} layers (measured" in stages.why
    assert stages.ends == (costs[1][1] if pipeline == "gpipe" else 0)


def test_stages_are_measured_when_a_run_begins(tmp_path, monkeypatch, fast_jit):
    monkeypatch.setattr(pretrain.jaxhet, "jit", fast_jit)
    words = ["--config=tiny", "--batch=8", "--seq=16", "--steps=1", "--stages=auto"]
    words += ["--pipeline=1f1b", "--microbatches=2", f"--run-dir={tmp_path}"]
    pretrain.main([*words, "--mesh=stage=2,data=2"])
    (row,) = read_rows(tmp_path / METRICS)
    assert row["stages"]["layers"] == [1, 1]
    with pytest.raises(SystemExit, match="--stages auto on --mesh data=4, which has no axis"):
        pretrain.main([*words, "--mesh=data=4"])


def test_batch_that_does_not_fit_says_what_to_change(make_mesh, fast_jit):
    with pytest.raises(ValueError, match="8 can't be divided into 3 microbatches"):
        gradients(fast_jit, make_mesh(stage=2), dataclasses.replace(FOUR, microbatches=3))
