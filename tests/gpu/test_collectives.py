"""Collective × dtype × odd size on islands of GPUs against numpy; one job for each transport.

    python -m pytest tests/gpu/test_collectives.py -s

prints a table for each. On CPU a few dtypes keep the test itself working. RDMA is tests/softverbs/.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks import gpus
from jaxhet.compiler import Options
from jaxhet.testing import Job, Shape, island_job
from tests.support import collectives
from tools.programs import softverbs

CHUNK_BYTES = 64 * 1024
DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool", "complex64"),
)
FEW = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of job."""

    platform: str
    transport: str
    shape: Shape
    dtypes: tuple[str, ...] = DTYPES


def cases() -> dict[str, Case]:
    found = [Case("cpu", transport, Shape(2), FEW) for transport in ("process_vm", "verbs")]
    for transport in ("cuda_ipc", "host", "verbs", "socket"):
        # The software NICs are slow, and no transport knows the type of its data.
        dtypes = FEW if transport == "verbs" else DTYPES
        found += [Case("cuda", transport, shape, dtypes) for shape in (Shape(2), Shape(2, 1, 2))]
    found.append(Case("cuda", "cuda_ipc", Shape(2, 2)))
    return {f"{case.platform}-{case.transport}-{case.shape}": case for case in found}


CASES = cases()
SLOW = ("cpu-process_vm-2x1x1",)  # on CPUs one transport is enough to try the test itself


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    # One GPU is enough, because processes can share it: only slower.
    if found.platform == "cuda" and (reason := gpus.why_fewer_than(1)):
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def job(case: Case) -> Iterator[Job]:
    env = {
        "JAX_PLATFORMS": case.platform,
        "JAX_ENABLE_X64": "1",
        "JAXHET_TRANSPORTS": case.transport,
        "JAXHET__CHUNK_BYTES": str(CHUNK_BYTES),
    }
    if case.platform == "cuda":
        env |= gpus.shared_by(case.shape.num_devices)
    if case.transport == "verbs":
        # A software NIC moves bytes of GPU memory by the driver. Where an island has several GPUs,
        # NCCL's set-up holds the driver until all exchanges are over: both would wait for ever.
        reaches_gpus = case.platform == "cuda" and case.shape.devices == 1
        env |= softverbs("cuda" if reaches_gpus else "")
    job = island_job(case.shape, env=env)
    yield job
    job.close()


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def sizes(dtype: str) -> list[int]:
    """Elements of a block: none, few, and around a chunk and some."""
    chunk = CHUNK_BYTES // itemsize(dtype)
    return [0, 1, 7, chunk - 1, chunk, chunk + 1, 3 * chunk + 5]


def ask(
    job: Job, case: Case, dtype: str, names: Sequence[str], elements: Sequence[int]
) -> collectives.Found:
    """Differences from numpy of collectives of blocks with these numbers of elements."""
    size = case.shape.num_devices
    cases = [
        collectives.Case(name, dtype, (number * collectives.factor(name, size),))
        for name in names
        for number in elements
        if number or name not in collectives.NOT_EMPTY
    ]
    request = (collectives.found, ("all", case.shape.devices_of_processes, cases))
    return collectives.merged(job.ask(request, 300))


@pytest.mark.timeout(900)
def test_collectives_are_those_of_numpy(case: Case, job: Job) -> None:
    wrong = []
    print(f"\n{case.transport} on {case.platform}, {case.shape}: right of all sizes")
    more = ("broadcast",) if case.platform == "cuda" else ()  # JAX has no lowering for CPUs
    for dtype in case.dtypes:
        right: dict[str, list[bool]] = {}
        names = (*collectives.operations(dtype), *more)
        for name, of_devices in ask(job, case, dtype, names, sizes(dtype)).items():
            texts = [f"{name}: {text}" for text, _ in of_devices.values() if text]
            wrong += texts
            right.setdefault(name.split()[0], []).append(not texts)
        cells = (f"{name} {sum(found)}/{len(found)}" for name, found in right.items())
        print(f"{dtype:14}", "  ".join(cells))
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_long_sums_come_in_parts(dtype: str, case: Case, job: Job) -> None:
    if case.platform != "cuda":
        pytest.skip("sums come in parts on GPUs only")
    of_island = case.shape.num_devices // case.shape.islands
    size = Options().part_bytes * 3 * of_island // itemsize(dtype) + 77
    for name, of_devices in ask(job, case, dtype, ("sum", "max"), [size]).items():
        assert not any(text for text, _ in of_devices.values()), (name, of_devices)


@pytest.mark.timeout(300)
def test_loops_store_and_gather_at_the_places_of_their_iterations(case: Case, job: Job) -> None:
    if (case.platform, case.transport, case.shape.devices) == ("cuda", "verbs", 1):
        # On an H200 the write of a software NIC stood in the driver until the connection failed.
        pytest.skip("a software NIC writes to a GPU by its driver, behind streams that wait")
    assert [wrong for wrong in job.ask((collectives.in_loops, ()), 300) if wrong] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 13), (257, 64)])
def test_bf16_sums_have_equal_bits_on_all_ranks(count: int, width: int, job: Job) -> None:
    answers = job.ask((collectives.precision, (count, width)))
    for name in answers[0]:
        digests = [digest for answer in answers for digest in answer[name]]
        assert len(set(digests)) == 1, f"{name}: ranks have {digests}"
