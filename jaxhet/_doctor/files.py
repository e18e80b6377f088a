"""Small files of the kernel, below a root folder."""

import pathlib


def read(root: pathlib.Path, path: str) -> str:
    """The text of a file without the white space around it; "" if it can't be read.

    Unused entries of the kernel's tables can't be read.
    """
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def names(root: pathlib.Path, path: str) -> list[str]:
    """Names in a folder, with numbers sorted by value; [] if the folder does not exist."""
    try:
        found = [entry.name for entry in (root / path).iterdir()]
    except OSError:
        return []
    return sorted(
        found, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
    )


def number(text: str, default: int) -> int:
    """The value of a decimal or 0x… number in a text."""
    try:
        return int(text, 0)
    except ValueError:
        return default
