"""Tables that C++ and Python both need say the same."""

from jaxhet import _config, _ffi
from jaxhet.compiler import ExchangeKind


def test_exchange_kinds_have_the_engines_numbers() -> None:
    for kind in ExchangeKind:
        assert _ffi.EXCHANGE_KINDS[kind.name.lower()] == kind.value


def test_transports_are_the_engines_best_first() -> None:
    assert _config.TRANSPORTS == _ffi.TRANSPORTS
