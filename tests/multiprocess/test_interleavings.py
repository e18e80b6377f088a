"""Orders of calls of five programs that look alike, on two islands.

The programs come from one factory: they have one name, signature and source line, and differ in
constants, or in constants and groups. Where both islands call them in one order, every result is
right. Where they do not, the first call that differs is refused on both islands, nothing of it has
arrived, and no later call succeeds.

`tests/cpp/interleaving_test.cc` does the same with many orders that differ, and looks at the
memory of the results, which Python cannot see.
"""

import dataclasses
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet
from jaxhet import testing
from jaxhet.testing import FAST_COMPILE, Job, Shape, island_job

pytestmark = pytest.mark.early

WORKER = pathlib.Path(__file__)
NUM_RANKS = 4
NUM_ORDERS = 200
CALLS = 6
ORDERS_PER_REQUEST = 50
NUM_JOBS = 20

Groups = list[list[int]] | None
# For each program: factor of `a`, summand, and groups of ranks.
CONSTANTS = ((1.5, 20.25), (2.5, 30.25), (3.5, 40.25), (4.5, 50.25), (5.5, 60.25))
GROUPS: tuple[Groups, ...] = (None, [[0, 2], [1, 3]], [[0, 3], [1, 2]], None, [[2, 0], [3, 1]])
FAMILIES: dict[str, list[tuple[float, float, Groups]]] = {
    "constants": [(c, d, None) for c, d in CONSTANTS],
    "groups": [(c, d, g) for (c, d), g in zip(CONSTANTS, GROUPS, strict=True)],
}


# --- the worker ---


def _factory(c: float, d: float, groups: Groups) -> Any:
    return lambda a: jax.lax.psum(a * c + d, "x", axis_index_groups=groups)


def _jitted(c: float, d: float, groups: Groups) -> Any:
    mesh = jaxhet.make_mesh({"x": -1})
    body = _factory(c, d, groups)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jaxhet.jit(mapped)


def _argument() -> jax.Array:
    data = np.arange(1, NUM_RANKS + 1, dtype=np.float32)
    sharding = NamedSharding(jaxhet.make_mesh({"x": -1}), P("x"))
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


class _Worker:
    """A process of the job."""

    def __init__(self) -> None:
        self._programs: dict[str, list[Any]] = {}

    def answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Calls the programs of a family in some orders, and tells the outcome of each.

        Args:
          request: `family`, and `orders`, a list for each process.
        """
        family = request["family"]
        if family not in self._programs:
            self._programs[family] = [_jitted(*which) for which in FAMILIES[family]]
        orders = request["orders"][jax.process_index()]
        return [self._call(self._programs[family], order) for order in orders]

    def _call(self, programs: Sequence[Any], order: Sequence[int]) -> dict[str, Any]:
        results: list[dict[int, float] | str] = []
        arrived = [_arrived()]
        x = _argument()
        for number in order:
            try:
                y = jaxhet.block_until_ready(programs[number](x))
                shards = y.addressable_shards
                results.append({s.index[0].start: np.asarray(s.data).item() for s in shards})
            except jaxhet.JaxhetError as error:
                results.append(f"{type(error).__name__}: {error}")
            arrived.append(_arrived())
        return {"results": results, "arrived": arrived}


def _arrived() -> tuple[int, int]:
    """Exchanges that have completed here, and bytes that arrived from the other process."""
    counts = jaxhet.stats()
    received = (key for key in counts if key.startswith("bytes_received_"))
    from_others = sum(counts[key] for key in received if key != "bytes_received_local")
    return counts["exchanges_completed"], from_others


# --- the tests ---


@dataclasses.dataclass(frozen=True)
class Orders:
    """The orders of both islands.

    Attributes:
      first: Order of island 0.
      second: Order of island 1.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]

    @property
    def place(self) -> int:
        """The first call that differs."""
        pairs = enumerate(zip(self.first, self.second, strict=True))
        return next(i for i, (a, b) in pairs if a != b)


def _equal_orders(draw: random.Random) -> Orders:
    order = tuple(draw.choices(range(len(CONSTANTS)), k=CALLS))
    return Orders(order, order)


def _unequal_orders(draw: random.Random) -> Orders:
    """Two orders that differ in any way, or in two neighbours, or by one call that is left out."""
    while True:
        first = list(_equal_orders(draw).first)
        second, place = list(first), draw.randrange(CALLS - 1)
        match draw.randrange(3):
            case 0:
                draw.shuffle(second)
            case 1:
                second[place : place + 2] = reversed(second[place : place + 2])
            case _:
                second = [*second[:place], *second[place + 1 :], draw.randrange(len(CONSTANTS))]
        if first != second:
            return Orders(tuple(first), tuple(second))


def _right(family: str, number: int, rank: int) -> float:
    c, d, groups = FAMILIES[family][number]
    group = next((g for g in groups or () if rank in g), range(NUM_RANKS))
    return sum((member + 1) * c + d for member in group)


def _ask(job: Job, family: str, orders: Sequence[Orders]) -> list[list[Any]]:
    """Outcome of each order on both processes."""
    both = ([o.first for o in orders], [o.second for o in orders])
    request = {"family": family, "orders": both}
    return [list(told) for told in zip(*job.ask(request), strict=True)]


def _assert_right(family: str, number: int, result: dict[int, float] | str) -> None:
    assert isinstance(result, dict), result
    assert len(result) == NUM_RANKS // 2
    for rank, value in result.items():
        assert value == _right(family, number, rank), (family, number, result)


def _assert_refused(family: str, orders: Orders, told: Sequence[dict[str, Any]]) -> None:
    """Checks what two islands tell that called programs in two orders."""
    place = orders.place
    words = [f" {FAMILIES[family][o[place]][0]}:f32" for o in (orders.first, orders.second)]
    for order, of_process in zip((orders.first, orders.second), told, strict=True):
        for number, result in zip(order[:place], of_process["results"], strict=False):
            _assert_right(family, number, result)
        for error in of_process["results"][place:]:
            assert isinstance(error, str), (orders, of_process)
            assert error.startswith("PlanMismatchError: "), (orders, error)
            assert "another program of the same name, jit" in error, error
            assert all(word in error for word in words), (words, error)
        assert len(set(of_process["arrived"][place:])) == 1, (orders, of_process)
        assert len(set(of_process["arrived"][: place + 1])) == place + 1, (orders, of_process)


def _job() -> Job:
    return island_job(Shape(2, 1, 2), WORKER, {**FAST_COMPILE, "JAXHET_DEADLINE_S": "20"})


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two islands of two devices."""
    one = _job()
    yield one
    one.close()


def _chunks(orders: Sequence[Orders]) -> Iterator[Sequence[Orders]]:
    for start in range(0, len(orders), ORDERS_PER_REQUEST):
        yield orders[start : start + ORDERS_PER_REQUEST]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_orders(family: str, job: Job) -> None:
    draw = random.Random(family)
    orders = [_equal_orders(draw) for _ in range(NUM_ORDERS // len(FAMILIES))]
    for chunk in _chunks(orders):
        for one, told in zip(chunk, _ask(job, family, chunk), strict=True):
            for of_process in told:
                for number, result in zip(one.first, of_process["results"], strict=True):
                    _assert_right(family, number, result)
    print(f"{family}: {len(orders)} orders of {CALLS} calls, all right")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, NUM_JOBS))]
)
def test_unequal_orders_in_jobs(seed: int) -> None:
    family = list(FAMILIES)[seed % len(FAMILIES)]
    orders = _unequal_orders(random.Random(seed))
    job = _job()
    try:
        (told,) = _ask(job, family, [orders])
    finally:
        job.close()
    _assert_refused(family, orders, told)


if __name__ == "__main__":
    testing.serve(_Worker().answer)
