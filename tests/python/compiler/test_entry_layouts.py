"""Arguments and results have the layout and the memory that they have without our passes."""

import pytest

from tests.python.compiler import worker
from tests.python.compiler.test_deviceless import require_compiler

pytestmark = [pytest.mark.timeout(300)]


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_layouts_and_memory_are_those_of_plain_xla(vendor: str):
    require_compiler(vendor)
    results = worker.run("entry_layouts.py", vendor, timeout_s=280)
    assert {name: r["error"] for name, r in results.items() if "error" in r} == {}
    for name, (plain, bridged, exchanges) in results.items():
        assert bridged == plain, name
        assert exchanges > 0, name
    in_host_memory = [name for name, (plain, _, _) in results.items() if "S(5)" in plain[1]]
    assert len(in_host_memory) == 8
    assert results["optimizer_step"][0][0] == [["device", "pinned_host"]]
    assert "input_output_alias={ {0}: (0" in results["optimizer_step"][0][1]
    assert results["columns_first"][0][1].count("{0,1}") == 3
