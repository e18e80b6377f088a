"""This process's GPUs."""

from typing import Any

from jaxhet import _ffi
from jaxhet._config import Config
from jaxhet._vendors import BY_PLATFORM


def own_gpus(config: Config, platform: str) -> list[dict[str, Any]]:
    """The GPUs of this process, as the driver describes them; [] on CPU, or without a driver."""
    if platform not in BY_PLATFORM:
        return []
    vendor = BY_PLATFORM[platform].name
    devices = next((found for name, found, _ in _ffi.vendors() if name == vendor), [])
    wanted = config.local_device_ids
    return [gpu for gpu in devices if not wanted or gpu["ordinal"] in wanted]
