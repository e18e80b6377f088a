"""The logger of jaxhet: Python's `logging` under the name "jaxhet", on stderr by default."""

import logging
import sys

from jaxhet._config import Config

LOGGER = logging.getLogger("jaxhet")


class _ToStderr(logging.Handler):
    """Writes each line of a message to the stderr of that moment, as `jaxhet: …`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            lines = (f"jaxhet: {line}" for line in self.format(record).splitlines())
            print("\n".join(lines), file=sys.stderr, flush=True)
        except Exception:  # `logging` itself reports errors of handlers
            self.handleError(record)


def apply(config: Config) -> None:
    """Sets the level that the option `log_level` gives; else the program's own level stays."""
    if "log_level" in config.given:
        LOGGER.setLevel(config.log_level.upper())


def _prepare() -> None:
    """Keeps a level and handlers that the program has set before it imported jaxhet."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.handlers:
        LOGGER.addHandler(_ToStderr())
        LOGGER.propagate = False


_prepare()
