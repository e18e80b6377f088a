"""Parts of jaxlib that the launcher and the coordinator use.

They avoid the package `jax`, whose import takes a second.
"""

import importlib.util
import pathlib
import pkgutil
import socket
from collections.abc import Mapping
from typing import Any, Literal

from jaxlib import version as _version

from jaxhet._errors import UsageError
from jaxhet._vendors import BY_PLATFORM

GPU_PLATFORMS = tuple(BY_PLATFORM)
Vendor = Literal["cpu", "cuda", "rocm"]
HEARTBEAT_TIMEOUT_S = 100
VERSION = _version.__version__  # jaxlib's
_OLDEST = (0, 11, 2)  # older ones have no mutual TLS for the coordination service
_NEWEST_TESTED = (0, 12)
TESTED = f"{'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST_TESTED))}"


def require_supported(package: str, version: str) -> None:
    """Checks that a version of jax or jaxlib is new enough.

    Raises:
      UsageError: It is too old.
    """
    if _numbers(version) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(f"{package} {version} is too old for jaxhet; install jax>={oldest}")


def untested(version: str) -> str:
    """Says that jaxhet was not tested with a version of jax, or ""."""
    newest = ".".join(map(str, _NEWEST_TESTED))
    if _numbers(version)[:2] <= _NEWEST_TESTED:
        return ""
    return f"jaxhet was tested with jax up to {newest}, and this is jax {version}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def start_coordination_service(
    host: str, num_processes: int, credentials: Mapping[str, Any]
) -> tuple[str, Any]:
    """Starts JAX's coordination service on a free port.

    It is recoverable: the death of one process does not end the others.

    Args:
      host: Address to listen on.
      num_processes: Size of the job.
      credentials: Arguments for mutual TLS, of `jaxhet/_net/certificates.py`; none: plain text.

    Returns:
      Address of the service, and the service (`shutdown()`).

    Raises:
      UsageError: jaxlib is too old.
    """
    require_supported("jaxlib", VERSION)
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # A port that is not held may be given to another job of this user; gRPC lets both listen.
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # gRPC sets it, too
        held.bind((host, 0))
        port = held.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        service = _jax.get_distributed_runtime_service(
            address,
            num_processes,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout=5,
            recoverable=True,
            **credentials,
        )
    return address, service


def installed_platform(chosen: str | None) -> str:
    """Platform that JAX will choose in another process; loads no plugin.

    Args:
      chosen: JAX_PLATFORMS of that process.
    """
    first = (chosen or "gpu").split(",")[0]
    if first != "gpu":
        return first
    namespace = importlib.util.find_spec("jax_plugins")
    folders = namespace.submodule_search_locations if namespace else None
    names = [module.name for module in pkgutil.iter_modules(folders or ())]
    installed = (p for p in GPU_PLATFORMS if any(n.startswith(f"xla_{p}") for n in names))
    return next(filter(count_gpus, installed), "cpu")


def count_gpus(platform: str) -> int:
    """The GPUs of this machine that processes can open, by their device files; loads no driver."""
    from jax._src import hardware_utils

    prefix = BY_PLATFORM[platform].device_files
    if not prefix:
        return max(0, hardware_utils.num_available_amd_gpus())
    names = (path.name for path in pathlib.Path("/dev").glob(f"{prefix}*"))
    files = sum(name.removeprefix(prefix).isdigit() for name in names)
    return files or int(platform == "cuda" and hardware_utils.has_visible_nvidia_gpu())
