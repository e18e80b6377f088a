"""Writes the table of options in README.md anew, from `jaxhet._config.OPTIONS`."""

import pathlib
import re

from jaxhet import _config

_README = pathlib.Path(__file__).parents[1] / "README.md"


def table() -> str:
    """The table: environment name, default and meaning of every option."""
    return "\n".join(
        ["| environment | default | meaning |", "|---|---|---|", *map(_row, _config.OPTIONS)]
    )


def _row(option: _config.Option) -> str:
    meaning = option.help
    if option.choices:
        meaning += ": " + ", ".join(f"`{choice}`" for choice in option.choices)
    if option.agreed:
        meaning += "; *all processes*"
    return f"| `{option.env}` | {_default(option.default)} | {meaning} |"


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool | float):
        return f"{value:g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    old = re.compile(r"\| environment \|.*?(?=\n\n)", re.DOTALL)
    _README.write_text(old.sub(lambda _: table(), _README.read_text()))
