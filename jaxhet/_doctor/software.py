"""Versions of JAX, its plugins and optional libraries."""

import ctypes
import importlib.metadata
import platform
import re
from collections.abc import Iterable

from jaxhet import _ffi
from jaxhet._doctor.report import Part, Plugin, Software
from jaxhet._errors import UsageError
from jaxhet._jax import compat
from jaxhet._vendors import BY_PLATFORM

_VERBS_LIBRARY = "libibverbs.so.1"
_PLUGIN_NAME = re.compile(rf"jax-({'|'.join(BY_PLATFORM)})\d+-(?:plugin|pjrt)")


def read_software(pyverbs: Part) -> Software:
    """Software of this Python; pyverbs may belong to another one."""
    versions = compat.versions()
    return Software(
        python=platform.python_version(),
        jaxhet=importlib.metadata.version("jaxhet"),
        jax=versions["jax"],
        jaxlib=versions["jaxlib"],
        hlo_hook=_hlo_hook(),
        plugins=find_plugins(
            (d.name, d.version) for d in importlib.metadata.distributions() if d.name
        ),
        verbs=load_library(_VERBS_LIBRARY),
        pyverbs=pyverbs,
        libcrypto=_libcrypto(),
    )


def find_plugins(packages: Iterable[tuple[str, str]]) -> tuple[Plugin, ...]:
    """The vendors' plugins among (name, version) of packages."""
    plugins = set()
    for package, version in packages:
        name = re.sub(r"[-_.]+", "-", package).lower()  # PEP 503
        if match := _PLUGIN_NAME.fullmatch(name):
            is_plugin = name.endswith("-plugin")
            problem = compat.plugin_problem(name, version) if is_plugin else ""
            plugins.add(Plugin(name, version, BY_PLATFORM[match[1]].name, problem))
    return tuple(sorted(plugins, key=lambda plugin: plugin.name))


def load_library(name: str) -> Part:
    """Whether a shared library can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return Part(False, str(error))
    return Part(True, name)


def _libcrypto() -> Part:
    try:
        return Part(True, _ffi.libcrypto())
    except UsageError as error:
        return Part(False, str(error))


def _hlo_hook() -> Part:
    try:
        compat.require_supported_jax()
    except UsageError as error:
        return Part(False, str(error))
    return Part(True, "jax.extend.xla.register_hlo_module_transformation")
