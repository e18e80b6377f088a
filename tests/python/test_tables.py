"""Tables that C++ and Python both need say the same."""

from jaxhet import _config, _ffi
from jaxhet.compiler import ExchangeKind


def test_exchange_kinds_have_the_engines_numbers() -> None:
    for kind in ExchangeKind:
        assert _ffi.EXCHANGE_KINDS[kind.name.lower()] == kind.value


def test_transports_are_the_engines_best_first() -> None:
    for table in (_ffi.TRANSPORTS, _ffi.RING_TRANSPORTS):
        allowed = [t for t in table if t != "local"]  # within a process, without a choice
        assert allowed == [t for t in _config.TRANSPORTS if t in table]
    assert {*_ffi.TRANSPORTS, *_ffi.RING_TRANSPORTS} == {*_config.TRANSPORTS, "local"}
