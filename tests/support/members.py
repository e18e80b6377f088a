"""Processes of a job, as they describe themselves."""

import dataclasses
from typing import Any

from jaxhet import _config, _set_up
from jaxhet._job.process_info import ProcessInfo


def described(
    process: int = 0, island: str = "", address: str = "127.0.0.1:9000", **changes: Any
) -> ProcessInfo:
    """Description of a process, by default of a job of two.

    Args:
      process: The process's id.
      island: The island that it declares; empty for the platform's.
      address: host:port to which peers connect.
      **changes: Values of other fields.
    """
    given = {"process_id": process, "num_processes": 2, "island": island}
    info = _set_up.make_process_info(_config.resolve(given, {}), address)
    return dataclasses.replace(info, **{"host": "host", "pid": 100 + process, **changes})
