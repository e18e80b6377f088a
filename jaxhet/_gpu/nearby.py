"""This process's GPUs, and their distances to the network interfaces of the machine."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxhet import _ffi
from jaxhet._config import Config
from jaxhet._vendors import BY_PLATFORM

_ROOT = pathlib.Path("/")
_UNKNOWN = len(_ffi.DISTANCES)  # distance of an interface that no PCI device carries
_MOST_LAYERS = 4  # such as a VLAN of a bond of NICs


def interface_distances(config: Config, platform: str) -> Mapping[str, int]:
    """The distance of each network interface to the nearest GPU of this process.

    Args:
      config: The options.
      platform: JAX's name of the process's platform.

    Returns:
      Places in `_ffi.DISTANCES`, and more for interfaces without a PCI device; by name. Empty on
      CPU, and where the driver does not answer.
    """
    return distances(_ROOT, [gpu["pci"] for gpu in own_gpus(config, platform)])


def own_gpus(config: Config, platform: str) -> list[dict[str, Any]]:
    """The GPUs of this process, as the driver describes them; [] on CPU, or without a driver."""
    if platform not in BY_PLATFORM:
        return []
    vendor = BY_PLATFORM[platform].name
    devices = next((found for name, found, _ in _ffi.vendors() if name == vendor), [])
    wanted = config.local_device_ids
    return [gpu for gpu in devices if not wanted or gpu["ordinal"] in wanted]


def distances(root: pathlib.Path, gpus: Sequence[str]) -> dict[str, int]:
    """`interface_distances` to the GPUs with these PCI addresses, by the sysfs below `root`."""
    folder = root / "sys/class/net"
    if not gpus or not folder.is_dir():
        return {}
    return {
        interface.name: min(
            _ffi.DISTANCES.index(_ffi.distance(root, gpu, nic)) if nic else _UNKNOWN
            for nic in _nics(interface)
            for gpu in gpus
        )
        for interface in folder.iterdir()
    }


def _nics(interface: pathlib.Path, layers: int = _MOST_LAYERS) -> list[str]:
    """PCI addresses of the NICs below an interface, which may be a bond or a VLAN; [""] if none."""
    own = _ffi.pci_address(interface)
    if own or not layers:
        return [own]
    below = [nic for lower in interface.glob("lower_*") for nic in _nics(lower, layers - 1)]
    return below or [""]
