"""`jax.distributed.initialize` and `jax.distributed.shutdown` that mean the job.

Nothing of JAX is imported before they are called: JAX may be in the middle of its own import.
"""

import atexit
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxhet import _config, _log
from jaxhet._errors import UsageError

if TYPE_CHECKING:
    from jaxhet._session import Session

# Argument of jax.distributed.initialize -> our option.
_OPTIONS = {
    "coordinator_address": "coordinator_address",
    "coordinator_bind_address": "coordinator_bind_address",
    "num_processes": "num_processes",
    "process_id": "process_id",
    "local_device_ids": "local_device_ids",
    "cluster_detection_method": "cluster_detection_method",
    "partition_index": "partition_index",
    "slice_index": "partition_index",
    "initialization_timeout": "connect_timeout_s",
    "heartbeat_timeout_seconds": "peer_timeout_s",
    "shutdown_timeout_seconds": "shutdown_timeout_s",
}
_IDENTITY = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
_SETTINGS = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file", "mtls_peer_uri_prefix")
_ALWAYS_MET = ("verify_secure_credentials",)
_MARK = "_jaxhet_is_in_place"


def take_over(module: Any) -> None:
    """Replaces `initialize` and `shutdown` of the module `jax.distributed`; again: does nothing.

    `is_initialized` stays: it tells whether JAX has a client, which a job gives it, too.
    """
    if hasattr(module.initialize, _MARK):
        return
    module.initialize = _replace(module.initialize, _initialize)
    module.shutdown = _replace(module.shutdown, _shutdown)


def report_at_exit() -> None:
    """Has the process say at its end that it computed outside of the job, if it did."""
    atexit.register(_report_unjoined)


def _replace(
    original: Callable[..., None], ours: Callable[[Callable[..., None], Mapping[str, Any]], None]
) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        ours(original, {name: value for name, value in given.items() if value is not None})

    setattr(replacement, _MARK, True)
    return replacement


def _initialize(original: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Joins the job; without a job, initializes JAX as JAX does."""
    from jaxhet import _session

    if (session := _session.current()) is not None:
        _check_same(session, given)
        return
    config = _config.resolve()
    if not config.auto or not _is_job(config):
        original(**given)
        return
    from jaxhet import _initialize as ours
    from jaxhet._jax import compat

    options = _options(given)
    if config.launched:
        _check_launched(config, options)
    compat.set_mtls({name: given[name] for name in _SETTINGS if name in given})
    ours.initialize(**options)


def _shutdown(original: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Leaves the job; without a job, shuts down as JAX does."""
    from jaxhet import _session

    if _session.current() is None:
        original(**given)
        return
    from jaxhet import _initialize as ours

    ours.shutdown()


def _is_job(config: _config.Config) -> bool:
    """Whether the environment says that this process belongs to a job of ours.

    Each of these is set for a job of jaxhet only.
    """
    marks = (
        *("launched", "job_secret", "job_secret_file", "island", "islands"),
        *("coordinator_address", "coordinator_bind_address"),
    )
    return any(getattr(config, name) for name in marks)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the arguments that the program gives.

    Raises:
      UsageError: An argument of which nothing is known.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OPTIONS:
            options[_OPTIONS[name]] = value
        elif name not in (*_SETTINGS, *_ALWAYS_MET):
            raise UsageError(
                f"jax.distributed.initialize was called with {name}={value!r}, which has no meaning"
                " in a job of several islands; leave it out"
            )
    ids = options.get("local_device_ids")
    if ids is not None:
        options["local_device_ids"] = (ids,) if isinstance(ids, int) else tuple(ids)
    return options


def _check_launched(config: _config.Config, options: Mapping[str, Any]) -> None:
    for name in ("coordinator_address", "num_processes", "process_id"):
        ours, given = getattr(config, name), options.get(name)
        if ours is not None and given is not None and given != ours:
            raise UsageError(
                f"jax.distributed.initialize was called with {name}={given!r}, and the job was"
                f" started with JAXHET_{name.upper()}={ours}; leave the argument out, or give it"
                " this value"
            )


def _check_same(session: "Session", given: Mapping[str, Any]) -> None:
    """Checks that a call after `jaxhet.initialize` means the same job."""
    if session.is_pretended:
        return
    options = _options(given)
    for name in _IDENTITY:
        ours, value = getattr(session.config, name), options.get(name)
        if value is not None and value != ours:
            raise UsageError(
                f"jax.distributed.initialize was called with {name}={value!r}, and this process is"
                f" in a job with {name}={ours!r} already; leave the argument out, or give it this"
                " value"
            )


def _report_unjoined() -> None:
    try:
        config = _config.resolve()
    except UsageError:  # which the program had when it tried to join
        return
    if not config.auto or not _is_job(config):
        return
    from jaxhet import _initialize as ours
    from jaxhet._jax import compat

    if ours.has_joined() or not compat.backend_exists():
        return
    _log.apply(config)
    _log.LOGGER.warning(
        "%s computed outside of the job: its program did not call"
        " jax.distributed.initialize or jaxhet.initialize; add the call, or set JAXHET_AUTO=0 if"
        " that was meant",
        f"process {config.process_id}" if config.process_id is not None else "this process",
    )
