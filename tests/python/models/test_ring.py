import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import attend
from models.configs import CONFIGS, Config
from models.extras.ring import ring_attend
from models.train import Trainer
from tests.python.models.conftest import FAST_COMPILE, SCHEDULE, loss_and_gradients
from tests.python.models.hlo_groups import collectives

# Groups of three query heads, and chunks of the loss that do not divide a device's positions.
ODD = dataclasses.replace(CONFIGS["tiny"], query_heads=6, kv_heads=2, loss_chunk=3)
TOKENS = jax.random.randint(jax.random.key(1), (4, 21), 0, ODD.vocab)
# A sum's rounding is relative to its terms: of a leaf, to its largest element.
ROUNDING = 1e-5


def distance(a: Any, b: Any) -> float:
    """The largest difference of two arrays, relative to the largest element of the second."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize(
    ("size", "positions", "heads", "kv_heads"),
    [
        (2, 2, 1, 1),
        (4, 12, 9, 3),
        pytest.param(2, 14, 6, 2, marks=pytest.mark.slow),
        pytest.param(4, 4, 5, 1, marks=pytest.mark.slow),
    ],
)
def test_attention_and_gradients_are_those_of_whole_rows(
    size, positions, heads, kv_heads, make_mesh, fast_jit
):
    shapes = [(3, positions, h, 8) for h in (heads, kv_heads, kv_heads, heads)]
    *inputs, weights = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes))

    def results(function):
        result, pull_back = jax.vjp(function, *inputs)
        return result, *pull_back(weights)

    expected = fast_jit(lambda: results(attend))()
    with jax.set_mesh(make_mesh(sequence=size)):
        found = fast_jit(lambda: results(ring_attend))()
    distances = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(distances) < 2e-6, distances


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_narrow_attention_is_that_of_float32(dtype, make_mesh, fast_jit):
    shapes = ((2, 8, 6, 8), (2, 8, 2, 8), (2, 8, 2, 8))
    inputs = [jax.random.normal(jax.random.key(i), s).astype(dtype) for i, s in enumerate(shapes)]

    def results(function, dtype):
        result, pull_back = jax.vjp(function, *(x.astype(dtype) for x in inputs))
        return result, *pull_back(jnp.ones_like(result))

    expected = fast_jit(lambda: results(attend, jnp.float32))()
    with jax.set_mesh(make_mesh(sequence=4)):
        found = fast_jit(lambda: results(ring_attend, dtype))()
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) <= 4 * float(jnp.finfo(dtype).eps)


def of_ring(config: Config, mesh: jax.sharding.Mesh, jit) -> Any:
    return loss_and_gradients(Trainer(config, SCHEDULE, mesh), TOKENS, jit)


@pytest.fixture(scope="module")
def alone():
    """`of_ring` of a config on one device."""

    @functools.cache
    def get(config: Config) -> Any:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
        return of_ring(config, mesh, jit)

    return get


def assert_close(found: Any, expected: Any) -> None:
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    distances = jax.tree.map(distance, found[1], expected[1])
    assert max(jax.tree.leaves(distances)) < ROUNDING, distances


@pytest.mark.parametrize(
    ("axes", "change"),
    [
        ({"sequence": 4}, {}),
        pytest.param({"sequence": 2, "model": 2}, {"loss_chunk": 0}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "sequence": 2}, {"remat": "full"}, marks=pytest.mark.slow),
        pytest.param({"sequence": 2}, {"qk_norm": True}, marks=pytest.mark.slow),
        pytest.param({"sequence": 2, "data": 2}, {"remat": "dots"}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "sequence": 2}, {"scan": False}, marks=pytest.mark.slow),
        pytest.param(
            {"expert": 2, "sequence": 2},
            {"experts": 4, "capacity_factor": 4.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(axes, change, alone, make_mesh, fast_jit):
    config = dataclasses.replace(ODD, **change)
    assert_close(of_ring(config, make_mesh(**axes), fast_jit), alone(config))


@pytest.mark.parametrize(
    "axes",
    [
        {"sequence": 4},
        pytest.param({"data": 2, "sequence": 2}, marks=pytest.mark.slow),
        {"sequence": 2, "model": 2},
    ],
    ids=str,
)
def test_no_activation_is_gathered(axes, make_mesh, fast_jit):
    trainer = Trainer(ODD, SCHEDULE, make_mesh(**axes))
    text = trainer.lower(fast_jit, 4, 20).compile().as_text()
    names = {name for name, _ in collectives(text)}
    assert names == {"all-reduce", "collective-permute"}
    permuted = [line for line in text.splitlines() if " collective-permute" in line]
    assert permuted
    # Keys and values together: [2, batch, positions, heads, head dimension] of one device.
    rows, positions = 4 // axes.get("data", 1), 20 // axes["sequence"]
    heads = ODD.kv_heads // axes.get("model", 1)
    assert all(f"f32[2,{rows},{positions},{heads},8]" in line for line in permuted), permuted


def test_shards_move_to_later_positions_only(make_mesh, fast_jit):
    trainer = Trainer(ODD, SCHEDULE, make_mesh(sequence=4))
    text = trainer.lower(fast_jit, 4, 20).compile().as_text()
    pairs = [joined for name, joined in collectives(text) if name == "collective-permute"]
    hops = [[[0, 1], [1, 2], [2, 3]], [[1, 2], [2, 3]], [[2, 3]]]
    home = [[[1, 0], [2, 1], [3, 2]], [[2, 0], [3, 1]], [[3, 0]]]
    assert sorted(pairs) == sorted([*hops, *hops, *home])  # forward, backward


def test_no_mask_is_kept_for_the_backward_pass(make_mesh):
    config = dataclasses.replace(ODD, layers=3)
    trainer = Trainer(config, SCHEDULE, make_mesh(sequence=2))
    params = jax.eval_shape(lambda: trainer.init(3).params)
    tokens = jax.ShapeDtypeStruct((4, 29), jnp.int32)
    with jax.set_mesh(trainer.mesh):
        traced = jax.make_jaxpr(jax.value_and_grad(trainer.loss))(params, tokens)
    arrays = [str(v.aval) for equation in traced.eqns for v in equation.outvars]
    assert any("28" in array for array in arrays)
    assert not [array for array in arrays if "14,14" in array or "28,28" in array]


def test_attention_of_cudnn_is_refused(make_mesh):
    with pytest.raises(ValueError, match=r"attention is \S+ring's: choose auto"):
        Trainer(dataclasses.replace(ODD, attention="cudnn"), SCHEDULE, make_mesh(sequence=2))
