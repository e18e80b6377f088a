"""The real CUDA and ROCm compilers, without a GPU: both keep the plan, its order and overlap."""

import re
import shutil
from typing import Any

import pytest

from jaxhet.compiler.codecs import CODECS
from tests.python.compiler import worker
from tests.python.compiler.install_plugins import PLUGINS
from tests.python.compiler.train_steps import TRAIN_STEPS

pytestmark = [pytest.mark.early, pytest.mark.timeout(900)]

_ENOUGH = 0.8
Results = dict[str, dict[str, Any]]


def require_compiler(vendor: str) -> None:
    """Skips a test that needs a vendor's compiler where it, or what it needs, is missing."""
    if not PLUGINS.exists():
        pytest.skip(f"{PLUGINS} is missing: python tests/python/compiler/install_plugins.py")
    tools = ["gcc", "nm", "readelf"] if vendor == "rocm" else []
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"stub libraries for ROCm need {', '.join(missing)}")


def _compile_all(vendor: str) -> Results:
    require_compiler(vendor)
    return worker.run("deviceless.py", vendor, timeout_s=880)


@pytest.fixture(scope="module")
def cuda() -> Results:
    return _compile_all("cuda")


@pytest.fixture(scope="module")
def rocm() -> Results:
    return _compile_all("rocm")


@pytest.fixture(params=["cuda", "rocm"])
def vendor(request: pytest.FixtureRequest) -> Results:
    return request.getfixturevalue(request.param)


def _overlapped(result: dict[str, Any], least: int = 1) -> float:
    """Fraction of the exchanged bytes with at least `least` matrix products in their flight."""
    all_bytes = overlapped = 0
    for events in result["schedule"]:
        products, before = 0, {}
        for what, index, num_bytes in events:
            if what == "matmul":
                products += 1
            elif what == "jaxhet_start":
                before[index] = products
            elif what == "jaxhet_done":
                all_bytes += num_bytes
                overlapped += num_bytes * (products - before[index] >= least)
    return overlapped / all_bytes


def _count(result: dict[str, Any], what: str) -> int:
    return sum(event[0] == what for events in result["schedule"] for event in events)


def test_every_program_compiles(vendor: Results):
    assert {name: r["error"] for name, r in vendor.items() if "error" in r} == {}


def test_both_vendors_have_the_same_plans(cuda: Results, rocm: Results):
    assert cuda.keys() == rocm.keys()
    for name, result in cuda.items():
        assert result["lines"] == rocm[name]["lines"], name
        assert result["fingerprint"] == rocm[name]["fingerprint"], name
        assert result["moved"] == rocm[name]["moved"], name
        assert len(result["moved"]) == len(result["lines"]), name


# Exchanges, and the largest number of bytes that a rank sends in all of them: a change of either is
# a longer wait of users.
_EXCHANGED = {
    "data_parallel": (17, 122_703_876),
    "fsdp": (88, 366_006_308),
    "fsdp_recomputed": (130, 548_458_532),
    "tensor_parallel": (17, 122_724_356),
    "balanced": (10, 246_456_328),
    "pipeline": (7, 35_655_756),
    "mixture_of_experts": (25, 458_280_976),
}


@pytest.mark.parametrize("name", TRAIN_STEPS)
def test_train_steps_have_as_many_exchanges_and_bytes_as_before(vendor: Results, name: str):
    result = vendor[name]
    assert (len(result["lines"]), result["num_bytes"]) == _EXCHANGED[name]


def test_starts_and_dones_are_scheduled_in_plan_order(vendor: Results):
    for name, result in vendor.items():
        for events in result["schedule"]:
            for what in ("jaxhet_start", "jaxhet_done"):
                indexes = [index for event, index, _ in events if event == what]
                assert indexes == sorted(indexes), name
        assert _count(result, "jaxhet_start") == len(result["lines"]), name
        assert _count(result, "jaxhet_done") == len(result["lines"]), name


@pytest.mark.parametrize(
    "name",
    ["train", "train_two_devices", "train_sharded_scan", *TRAIN_STEPS],
)
def test_exchanges_overlap_with_matrix_products(vendor: Results, name: str):
    assert _overlapped(vendor[name]) >= _ENOUGH


def test_exchanges_have_a_layer_of_time_where_layers_are_recomputed(vendor: Results):
    """The gathers of a layer's weights start before the gradients of the layer behind it."""
    a_third_of_a_layer = 8  # it has 7 products in the forward pass, and 21 in the backward pass
    assert _overlapped(vendor["fsdp_recomputed"], a_third_of_a_layer) >= _ENOUGH


def test_parts_of_a_long_sum_are_summed_in_place_while_others_come(vendor: Results):
    result = vendor["long_sum"]
    (events,) = (e for e in result["schedule"] if e)
    calls = [what for what, _, _ in events]
    assert calls[0] == "jaxhet_start"
    assert calls[-4:] == ["jaxhet_done", *["jaxhet_part"] * 3]
    assert result["copies"] == 0


def test_blocks_of_a_later_dimension_are_put_in_order_by_no_kernel(vendor: Results):
    assert vendor["split_features"]["reordered"] == 0


def test_sums_over_groups_of_unequal_size_are_exchanges_of_those_groups(vendor: Results):
    lines = vendor["sums_over_unequal_groups"]["lines"]
    assert sorted(re.findall(r"all_gather all-reduce sum flat bf16\[7\] (\S+)", str(lines))) == [
        "{{0,1,2},{3}}",
        "{{0,3},{1},{2}}",
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_large_exchanges_are_compressed(vendor: Results, codec: str):
    result = vendor[f"wire_{codec}"]
    bits = CODECS[codec].bits + (8 / 32 if CODECS[codec].has_blocks else 0)
    assert all(f" {CODECS[codec].text} " in line for line in result["lines"])
    # The operand has 8.5 MB. In the four exchanges a rank sends these shares of it.
    plain = 4096 * 516 * 4 * (1 / 2 + 1 / 4 + 1 / 4 + 1)
    assert result["num_bytes"] == pytest.approx(plain * bits / 32, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_both_vendors_compile_the_same_operations_of_a_codec(
    cuda: Results, rocm: Results, codec: str
):
    name = f"wire_{codec}"
    assert cuda[name]["operations"] == rocm[name]["operations"]
    assert any(operation.endswith(" convert") for operation in cuda[name]["operations"])


def test_halves_of_exchanges_stay_sharded_inside_islands(vendor: Results):
    lines = "\n".join(vendor["handles"]["lines"])
    size = 64 * 512 // 2 // 2  # half of the columns on each device, two elements in a byte
    assert lines.count(f"all_gather start f_0 u8[{size}] {{{{0,2,4}},{{1,3,5}}}}") == 1
    assert lines.count(f"permute finish f_0 u8[{size}]") == 3
    assert lines.count("finish f_1") == 3
    assert vendor["handles"]["num_bytes"] == 2 * (size + size // 16)


def test_local_phases_stay_collectives_of_xla(vendor: Results):
    result = vendor["train_two_devices"]
    assert _count(result, "reduce-scatter") >= len(result["lines"])
    assert _count(result, "all-gather") >= len(result["lines"])
    assert _count(vendor["train"], "reduce-scatter") == 0


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("data_parallel", {"reduce-scatter", "all-gather"}),
        ("fsdp", {"reduce-scatter", "all-gather"}),
        ("tensor_parallel", {"all-reduce"}),
        ("pipeline", {"all-reduce"}),
        ("mixture_of_experts", {"reduce-scatter", "all-gather"}),
    ],
)
def test_train_steps_have_local_collectives_of_xla(vendor: Results, name: str, local: set[str]):
    assert {what for what in local if not _count(vendor[name], what)} == set()


def test_nothing_that_crosses_islands_is_left_to_xla(vendor: Results):
    for name, result in vendor.items():
        assert result["crossing"] == [], name
        assert _count(result, "collective-permute") == 0, name
