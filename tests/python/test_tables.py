"""Tables that C++ and Python both need say the same."""

import re

import pytest

from jaxhet import _config, _ffi, _options
from jaxhet._errors import UsageError
from jaxhet.compiler import ExchangeKind


def test_exchange_kinds_have_the_engines_numbers() -> None:
    for kind in ExchangeKind:
        assert _ffi.EXCHANGE_KINDS[kind.name.lower()] == kind.value


def test_transports_are_the_engines_best_first() -> None:
    for table in (_ffi.TRANSPORTS, _ffi.DEVICE_TRANSPORTS):
        allowed = [t for t in table if t != "local"]  # within a process, without a choice
        assert allowed == [t for t in _options.TRANSPORTS if t in table]
    assert {*_ffi.TRANSPORTS, *_ffi.DEVICE_TRANSPORTS} == {*_options.TRANSPORTS, "local"}


def test_engine_needs_exactly_the_options_that_the_table_marks() -> None:
    with pytest.raises(UsageError, match="no engine option is called 'x'; there are") as error:
        _ffi.Engine(0, 1, {"x": 1})
    values = _config.resolve({}, {}).engine_values()
    assert sorted(re.findall(r"\w+", str(error.value).partition("there are")[2])) == sorted(values)
    _ffi.Engine(0, 1, values)


def test_engine_has_no_default_of_its_own() -> None:
    values = _config.resolve({}, {}).engine_values()
    del values["deadline_ms"]
    with pytest.raises(UsageError, match="the engine option 'deadline_ms' is not given"):
        _ffi.Engine(0, 1, values)
