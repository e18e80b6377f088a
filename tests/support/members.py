"""Processes of a job, as `jaxhet._islands` sees them."""

import types
from typing import Any


def member(process: int, island: str, platform: str = "cpu", host: str = "host") -> Any:
    """The facts about a process that islands are made of."""
    return types.SimpleNamespace(process=process, island=island, platform=platform, host=host)
