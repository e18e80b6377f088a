"""`jaxhet.optim` on four devices of one process, as pairs of two positions."""

import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import optim
from jaxhet._microscaling import decode, encode
from jaxhet._options import CODECS
from tests.support.microscaling import decoded, drawn, same_bits

SGD: Any = optax.sgd(0.125)


@pytest.fixture(autouse=True)
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(optim, "LEAST_BYTES", 1)
    with jax.set_mesh(jaxhet.make_mesh({"island": 2, "model": 2})):
        yield


@pytest.mark.parametrize("codec", CODECS)
def test_arrays_of_programs_have_the_bits_of_the_reference(codec: str) -> None:
    for columns in (320, 323):  # blocks in rows, and in the flat array
        x = drawn(3, (500, columns))
        rows = x if columns == 320 else x.reshape(-1)
        y = jax.jit(lambda x: decode(encode(x, codec), codec, x.shape))(x)
        assert same_bits(np.asarray(y), decoded(rows, codec).reshape(x.shape))


def _gradients(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    shapes = {"w": (2, 64, 6), "b": (2, 5)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


PARAMS: Any = jax.tree.map(lambda x: x[0] * 0, _gradients(0))


def test_error_feedback_loses_nothing_over_many_steps() -> None:
    steps, small = 30, 0.05  # below half of the block's unit, 1/4
    gradient = {"b": np.full((2, 5), small, np.float32)}
    gradient["b"][:, 0] = 1
    tx: Any = optim.error_feedback(optax.scale(1.0), "island", "mxint4")
    total: Any = np.zeros(5, np.float32)
    state = jax.jit(tx.init)({"b": total})
    for _ in range(steps):
        updates, state = jax.jit(tx.update)(gradient, state)
        total = total + updates["b"]
    assert not decoded(gradient["b"], "mxint4")[:, 1:].any()  # without feedback
    np.testing.assert_allclose(total[0], steps)
    np.testing.assert_allclose(total[1:], steps * small, atol=1 / 8)


def test_error_feedback_tells_of_nan_once() -> None:
    tx: Any = optim.error_feedback(optax.scale(1.0), "island", "mxint8")
    bad = _gradients(0)
    bad["b"][1, 2] = np.inf
    updates, state = jax.jit(tx.update)(bad, jax.jit(tx.init)(PARAMS))
    assert np.isnan(updates["b"]).all()
    assert not np.isnan(updates["w"]).any()
    updates, _ = jax.jit(tx.update)(_gradients(1), state)
    assert not np.isnan(updates["b"]).any()


def _copies() -> Any:
    return jax.tree.map(lambda x: np.stack([x, x]), jax.tree.map(lambda x: x[0], _gradients(99)))


def _run(tx: optax.GradientTransformation, copies: Any, state: Any, steps: range) -> Any:
    for step in steps:
        updates, state = jax.jit(tx.update)(_gradients(step), state, copies)
        copies = optax.apply_updates(copies, updates)
    return copies, state


def test_diloco_of_one_step_is_data_parallel() -> None:
    tx: Any = optim.diloco(SGD, optax.sgd(1.0), "island", every=1)
    copies, state = _run(tx, _copies(), jax.jit(tx.init)(_copies()), range(5))
    plain: Any = jax.tree.map(lambda x: x[0], _copies())
    inner = SGD.init(PARAMS)
    for step in range(5):
        mean = jax.tree.map(lambda x: x.mean(0), _gradients(step))
        updates, inner = SGD.update(mean, inner)
        plain = optax.apply_updates(plain, updates)
    for name, x in plain.items():
        np.testing.assert_allclose(state.params[name], x, atol=1e-6)
        np.testing.assert_allclose(copies[name], np.stack([x, x]), atol=1e-6)


def test_diloco_exchanges_fragments_in_turn() -> None:
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx: Any = optim.diloco(SGD, outer, "island", every=4, fragments=2, wire="mxint8")
    copies, state, met = _copies(), jax.jit(tx.init)(_copies()), []
    for step in range(8):
        before = state.params
        copies, state = _run(tx, copies, state, range(step, step + 1))
        for name in PARAMS:
            if np.any(before[name] != state.params[name]):
                met.append((step + 1, name))
                own = np.asarray(copies[name])
                np.testing.assert_allclose(own[0], own[1], atol=1e-6)
            elif step not in (1, 3, 5, 7):
                assert np.max(np.abs(copies[name][0] - copies[name][1])) > 1e-3
    assert met == [(2, "w"), (4, "b"), (6, "w"), (8, "b")]


def test_diloco_with_delay_applies_what_was_sent() -> None:
    tx: Any = optim.diloco(SGD, optax.sgd(0.5), "island", every=4, delay=2)
    copies, state = _run(tx, _copies(), jax.jit(tx.init)(_copies()), range(11))
    for name in PARAMS:
        own, outer = np.asarray(_copies()[name]), np.asarray(_copies()[name][0])
        sent = np.zeros_like(outer)
        for step in range(1, 12):
            own = own - 0.125 * _gradients(step - 1)[name]
            if step in (6, 10):
                outer = outer - 0.5 * sent
                own = (own + outer) / 2
            if step in (4, 8):
                sent = (outer - own).mean(0)
        np.testing.assert_allclose(state.params[name], outer, atol=1e-5)
        np.testing.assert_allclose(copies[name], own, atol=1e-5)


@pytest.mark.parametrize("kind", ["error_feedback", "diloco", "delayed"])
def test_state_from_a_checkpoint_goes_on_with_the_same_bits(
    kind: str, tmp_path: pathlib.Path
) -> None:
    adam: Any = optax.adam(1e-2)
    if kind != "error_feedback":
        delay = 2 if kind == "delayed" else 0  # the last of four steps starts an exchange
        tx: Any = optim.diloco(
            adam, adam, "island", every=3, fragments=2, delay=delay, wire="mxint4"
        )
        copies = _copies()
    else:
        tx: Any = optim.error_feedback(adam, "island", "mxint4")
        copies = PARAMS
    there = _run(tx, copies, jax.jit(tx.init)(copies), range(4))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", there)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", there)
    pairs = cast(Any, (there, back))
    ends = [_run(tx, start[0], start[1], range(4, 8)) for start in pairs]
    for x, y in zip(*map(jax.tree.leaves, ends), strict=True):
        assert jnp.array_equal(x, y)


def test_exchange_leaves_arrays_split_over_other_axes() -> None:
    def put(shape: tuple[int, ...], *spec: str | None) -> Any:
        split = NamedSharding(jax.sharding.get_mesh(), P(*spec))
        return {"w": jax.device_put(np.ones(shape, np.float32), split)}

    gradients = put((2, 64, 128), "island", None, "model")
    tx: Any = optim.error_feedback(SGD, "island", "mxint8")
    state = jax.jit(tx.init)(put((64, 128), None, "model"))
    text = str(jax.jit(tx.update).lower(gradients, state).compile().as_text())
    moved = re.findall(r"= s8\[([\d,]+)\]\S* ([a-z-]+?)(?:-start)?\(", text)
    found = {math.prod(map(int, shape.split(","))) for shape, op in moved if "permute" in op}
    assert found == {64 * 128 // 2}
    assert not [op for _, op in moved if op.startswith("all-")]


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(jaxhet.UsageError, match="wire='int8' is not valid; codecs: bf16, mxfp8"):
        optim.error_feedback(SGD, "island", "int8")
    with pytest.raises(jaxhet.UsageError, match="every=2, fragments=3 and delay=0; give at"):
        optim.diloco(SGD, SGD, "island", every=2, fragments=3)
    with pytest.raises(jaxhet.UsageError, match=r"delay=2; give at least .* delay below every"):
        optim.diloco(SGD, SGD, "island", every=2, delay=2)
    tx: Any = optim.diloco(SGD, SGD, "data", every=2)
    with pytest.raises(jaxhet.UsageError, match="no axis 'data' in the mesh"):
        tx.init(_copies())
    tx: Any = optim.diloco(SGD, SGD, "island", every=2)
    with pytest.raises(jaxhet.UsageError, match=r"a leaf has the shape \(5,\): each begins with 2"):
        tx.init({"b": np.ones(5, np.float32)})
    with pytest.raises(jaxhet.UsageError, match=r"a leaf has the shape \(2, 0\): leave out"):
        tx.init({"b": np.ones((2, 5), np.float32), "empty": np.ones((2, 0), np.float32)})
