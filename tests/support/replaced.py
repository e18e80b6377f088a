"""Takes back what tests put into JAX."""

import pytest

from jaxhet._jax.replacements import REPLACEMENTS, place


def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `monkeypatch` restore the names of JAX that jaxhet replaces."""
    for owner, name in map(place, REPLACEMENTS):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, getattr(owner, name))
