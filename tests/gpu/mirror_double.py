"""Another vendor's plugin where there is only NVIDIA's: the CUDA plugin under ROCm's name.

Test-only. JAX loads the plugin a second time, as "rocm", for the process's backend. Its devices are
published as rocm:…/cuda/…, so that without the topology mirror the processes would wait for each
other in vain.
"""

import dataclasses
import importlib.util
import pathlib
from typing import Any

from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from jaxhet import _set_up
from jaxhet._job.process_info import ProcessInfo

NAME = "rocm"


def install(as_vendor: bool = False) -> None:
    """Makes this process one of the other vendor. Before `jaxhet.initialize`.

    Args:
      as_vendor: Whether the engine takes its devices for AMD's as well; it then loads libamdhip64,
        which has to be the double of tests/gpu/hip_double.
    """
    library = _library()
    make_client = xla_client.make_c_api_client

    def make_as_other(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cuda":
            xla_client.load_pjrt_plugin_dynamically(NAME, str(library))
            xla_client.initialize_pjrt_plugin(NAME)
            name = NAME
        return make_client(name, *args, **kwargs)

    xla_client.make_c_api_client = make_as_other
    changes: dict[str, Any] = {"topology": (NAME, "cuda")}
    if as_vendor:
        changes["platform"] = NAME
        xla_client.register_custom_call_handler(NAME.upper(), _register_with_cuda)
    info = _set_up.make_process_info

    def info_as_other(*args: Any) -> ProcessInfo:
        return dataclasses.replace(info(*args), **changes)

    _set_up.make_process_info = info_as_other


def _library() -> pathlib.Path:
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in pathlib.Path(folder).glob("xla_cuda*/xla_cuda_plugin.so"):
            return path
    raise FileNotFoundError("no CUDA plugin: pip install 'jax[cuda13]'")


def _register_with_cuda(
    name: str, function: Any, platform: str, /, api_version: int = 0, traits: Any = None
) -> None:
    """The custom calls of the other vendor belong to the plugin that stands for it.

    Called with the lock of the handlers held.
    """
    del platform
    if not name.startswith("jaxhet_"):
        return
    handlers = xla_client._custom_callback_handler  # pyright: ignore[reportAttributeAccessIssue]
    handlers["CUDA"](name, function, "CUDA", api_version, traits)
