"""Guests are booted once and shared by all tests; one that died or hung is replaced."""

from collections.abc import Callable, Iterator

import pytest

from tests.rdma_vm.guest import Guest, boot, boot_pair
from tests.rdma_vm.image import Image, UnavailableError, load

Guests = tuple[Guest, ...]


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        return load()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def _booted() -> Iterator[dict[str, Guests]]:
    booted: dict[str, Guests] = {}
    yield booted
    for guest in (guest for guests in booted.values() for guest in guests):
        guest.close()


def _live(booted: dict[str, Guests], key: str, start: Callable[[], Guests]) -> Guests:
    if not all(guest.is_alive for guest in booted.get(key, ())):  # one died or hung
        for guest in booted.pop(key):
            guest.close()
    if key not in booted:
        booted[key] = start()
    return booted[key]


@pytest.fixture
def guest(image: Image, _booted: dict[str, Guests]) -> Guest:
    """A guest whose ranks share its rxe0."""
    return _live(_booted, "one", lambda: (boot(image),))[0]


@pytest.fixture
def pair(image: Image, _booted: dict[str, Guests]) -> Guests:
    """Two guests whose rxe0 are joined."""
    return _live(_booted, "two", lambda: boot_pair(image))
