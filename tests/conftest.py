"""The order of the test files, for several workers."""

import pytest

# Minutes each: they come first, so that no worker is left with one of them at the end.
_LONG = (
    "tests/rdma_vm/",
    "tests/faults/test_kill.py",
    "tests/python/compiler/test_numeric.py",
    "tests/multiprocess/test_random.py",
    "tests/python/compiler/test_deviceless.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        matches = (i for i, prefix in enumerate(_LONG) if item.nodeid.startswith(prefix))
        return next(matches, len(_LONG))

    items.sort(key=place)
