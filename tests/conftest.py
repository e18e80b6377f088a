"""How the tests are shared among several workers (pytest-xdist)."""

import pytest

# Minutes each: they come first, so that no worker is left with one of them at the end.
_LONG = (
    "tests/rdma_vm/",
    "tests/faults/test_kill.py",
    "tests/python/compiler/test_numeric.py",
    "tests/multiprocess/test_random.py",
    "tests/python/compiler/test_deviceless.py",
)
# Folders whose files share what can't be had twice.
_TOGETHER = ("tests/rdma_vm/",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        matches = (i for i, prefix in enumerate(_LONG) if item.nodeid.startswith(prefix))
        return next(matches, len(_LONG))

    items.sort(key=place)
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = next((folder for folder in _TOGETHER if file.startswith(folder)), file)
        item.add_marker(pytest.mark.xdist_group(group))
