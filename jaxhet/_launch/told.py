"""The message by which a process tells `jaxhet launch` that it knows of the job's failure.

It writes a line on stderr, which arrives without a coordinator, too. The launcher does not show the
line.
"""

import os

_LINE = b"jaxhet: this process knows that its job has failed"


def tell() -> None:
    """Writes the message."""
    os.write(2, _LINE + b"\n")


def remove(line: bytes) -> bytes | None:
    """Returns `line` without the message, or None if the message is not in it.

    A program may have written the beginning of a line of its own before it.
    """
    return line.replace(_LINE, b"") if _LINE in line else None
