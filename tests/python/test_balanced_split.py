import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhet


@pytest.mark.parametrize(
    ("total", "seconds", "options", "counts"),
    [
        (16, [1, 1], {}, (8, 8)),
        (16, [1, 3], {}, (12, 4)),
        (16, [0.10, 0.21], {}, (11, 5)),
        (3, [1, 1], {}, (2, 1)),  # the first one has the remainder
        (4, [1, 100], {}, (3, 1)),  # at least one
        (16, [1, 1], {"fixed": [0, 6]}, (11, 5)),
        (16, [1, 3], {"most": [10, 16]}, (10, 6)),
        (14, [1, 2, 4], {}, (8, 4, 2)),
        (5, [2.0], {}, (5,)),
    ],
)
def test_split(total: int, seconds: list[float], options: Any, counts: tuple[int, ...]) -> None:
    assert jaxhet.balanced_split(total, seconds, **options) == counts


def test_no_other_split_is_faster() -> None:
    draw = random.Random(0)
    for _ in range(200):
        num, total = draw.randint(1, 3), draw.randint(3, 12)
        seconds = [draw.uniform(0.1, 3) for _ in range(num)]
        fixed = [draw.choice([0, draw.uniform(0, 4)]) for _ in range(num)]
        most = [draw.randint(-(-total // num), total) for _ in range(num)]

        def longest(
            counts: tuple[int, ...], seconds: list[float] = seconds, fixed: list[float] = fixed
        ) -> float:
            return max(c + k * t for c, k, t in zip(fixed, counts, seconds, strict=True))

        others = itertools.product(*(range(1, m + 1) for m in most))
        best = min(longest(counts) for counts in others if sum(counts) == total)
        found = jaxhet.balanced_split(total, seconds, fixed=fixed, most=most)
        assert sum(found) == total
        assert all(1 <= k <= m for k, m in zip(found, most, strict=True))
        assert longest(found) == pytest.approx(best)


@pytest.mark.parametrize(
    ("total", "seconds", "options", "words"),
    [
        (1, [1, 1], {}, "1 microbatches for 2 islands, and each island computes at least one"),
        (8, [1, 0], {}, r"seconds\[1\] is 0; a microbatch takes a time above 0"),
        (8, [1, float("nan")], {}, r"seconds\[1\] is nan"),
        (8, [1, 1], {"fixed": [0, -1]}, r"fixed\[1\] is -1"),
        (8, [1, 1], {"fixed": [0]}, "2 seconds, 1 fixed and 2 most"),
        (8, [1, 1], {"most": [8, 0]}, r"most\[1\] is 0, and each island computes at least one"),
        (8, [1, 1], {"most": [4, 3]}, r"8 microbatches, and the islands have room for 4 \+ 3"),
        (8, [], {}, "0 seconds"),
    ],
)
def test_split_that_is_not_possible(total: int, seconds: Any, options: Any, words: str) -> None:
    with pytest.raises(jaxhet.UsageError, match=words):
        jaxhet.balanced_split(total, seconds, **options)


def _sum(params: Any, batch: Any) -> Any:
    return jnp.sum(batch * params), batch.size


@pytest.mark.parametrize(
    ("loss", "batch", "counts", "words"),
    [
        (_sum, (1, 2, 3), [1, 1], r"counts are int32\[2\]: give one integer for each of the 1 pos"),
        (_sum, (1, 2, 3), [1.0], r"counts are float32\[1\]"),
        (_sum, (2, 2, 3), [1], r"shapes \[\(2, 2, 3\)\]: each begins with \[1, m\]"),
        (_sum, (1, 0, 3), [1], r"shapes \[\(1, 0, 3\)\]"),
        (lambda p, b: jnp.sum(p * b), (1, 2, 3), [1], "has other results than two scalars"),
        (lambda p, b: (p * b, b.size), (1, 2, 3), [1], r"two scalars.*float32\[3\]"),
    ],
)
def test_call_with_other_shapes(loss: Any, batch: Any, counts: Any, words: str) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    balanced = jaxhet.balanced_value_and_grad(loss, axis="data", mesh=mesh)
    with pytest.raises(jaxhet.UsageError, match=words):
        jax.jit(balanced)(jnp.float32(1), np.zeros(batch, np.float32), np.array(counts))


def test_part_without_a_loss() -> None:
    with pytest.raises(jaxhet.UsageError, match="has parts for amd, and no loss: name it"):
        jaxhet.balanced_value_and_grad({"nv": _sum}, axis="data", parts={"amd": 2})


def test_mesh_without_the_axis() -> None:
    balanced = jaxhet.balanced_value_and_grad(_sum, axis="data")
    with pytest.raises(jaxhet.UsageError, match=r"no axis 'data' in the mesh \{\}: give the mesh"):
        jax.jit(balanced)(1.0, np.zeros((1, 1)), np.array([1]))


def test_axis_of_one_position_has_nothing_to_exchange() -> None:
    def loss(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(params * batch), jnp.asarray(batch.size, jnp.float32)

    balanced = jaxhet.balanced_value_and_grad(
        loss, axis="data", mesh=jax.make_mesh((1,), ("data",))
    )
    batch = jnp.array([[[1.0, 3.0], [5.0, 7.0], [100.0, 100.0]]])  # the last one does not count
    value, gradient = jax.jit(balanced)(jnp.float32(2), batch, np.array([2]))
    assert (float(value), float(gradient)) == (8.0, 4.0)
