"""Makes an unmodified program join and leave the job, or fail.

`tools/jaxhet_auto.pth` is installed beside the package. It calls `install` in every Python that
starts with JAXHET_AUTO in its environment, so this file imports little: most of these programs are
not JAX programs.
"""

import importlib.abc
import importlib.machinery
import pathlib
import site
import sys
import types
from collections.abc import Sequence
from typing import Any

START_FILE = "jaxhet_auto.pth"
_MODULE = "jax.distributed"


def install() -> None:
    """Replaces the functions of `jax.distributed` when the program imports it."""
    sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Whether this Python reads `START_FILE` when it starts."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return any(pathlib.Path(folder, START_FILE).is_file() for folder in folders)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `jax.distributed` once, where Python would."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads `jax.distributed` as another loader does, then replaces its functions."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        from jaxhet import _distributed

        _distributed.take_over(module, _join, _leave)
        _distributed.guard(module, _join)


def _join(**options: Any) -> None:
    from jaxhet import _initialize

    _initialize.initialize(**options)


def _leave() -> None:
    from jaxhet import _initialize

    _initialize.shutdown()
