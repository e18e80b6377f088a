"""Messages: Python's logger "jaxhet", its level, and the form of its lines on stderr."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxhet import _config, _log

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    level = _log.LOGGER.level
    yield _log.LOGGER
    _log.LOGGER.setLevel(level)


def test_message_is_lines_of_jaxhet_on_stderr(logger: logging.Logger, capsys):
    logger.info("process %d is late\nits peer waits", 3)
    assert capsys.readouterr().err == "jaxhet: process 3 is late\njaxhet: its peer waits\n"


def test_less_severe_messages_than_the_option_are_not_written(logger: logging.Logger, capsys):
    _log.apply(_config.resolve({}, {"JAXHET_LOG_LEVEL": "error"}))
    logger.warning("hidden")
    logger.error("shown")
    assert capsys.readouterr().err == "jaxhet: shown\n"


def test_level_of_the_program_stays_without_the_option(logger: logging.Logger, capsys):
    logger.setLevel(logging.CRITICAL)
    _log.apply(_config.resolve({}, {}))
    logger.error("hidden")
    assert capsys.readouterr().err == ""


def test_messages_go_through_the_logger():
    """Only commands, whose output it is, print to stderr themselves."""
    names = {
        path.relative_to(_ROOT / "jaxhet").as_posix()
        for path in (_ROOT / "jaxhet").rglob("*.py")
        if re.search(r"print\([^#]*?file=sys\.stderr", path.read_text())
    }
    assert {name for name in names if not name.startswith("cli/")} == {"_log.py"}
