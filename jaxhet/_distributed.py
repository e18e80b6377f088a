"""Makes `jax.distributed`, or the first use of JAX, of an unmodified program join the job.

The functions import JAX when they are called: JAX may be in the middle of its own import.

The *program* is the first process, of those that start one another, that imports JAX with
JAXHET_AUTO in its environment. It joins the job before it uses a backend, or fails. Its children
(loaders of data, tools) may use JAX for themselves.
"""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxhet import _clusters, _config, _log
from jaxhet._errors import UsageError
from jaxhet._jax import first_use
from jaxhet._job import place

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
    "shutdown_timeout_seconds": "exit_timeout_s",
}
_NUMBERS = ("num_processes", "process_id")
_IDENTITY = ("coordinator_address", *_NUMBERS, "local_device_ids")
# A job always has TLS, with certificates of its own.
_MTLS = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file", "mtls_peer_uri_prefix")
MTLS_VARIABLES = tuple(f"JAX_{name.upper()}" for name in _MTLS)
_ALWAYS_MET = (*_MTLS, "verify_secure_credentials")
_MARK = "_jaxhet_is_in_place"


def take_over(module: Any, join: Callable[..., None], leave: Callable[[], None]) -> None:
    """Replaces `initialize` and `shutdown` of the module `jax.distributed`, once.

    `is_initialized` tells whether JAX has a client, which a job gives it, too.

    Args:
      module: The module.
      join: `jaxhet.initialize`.
      leave: `jaxhet.shutdown`.
    """
    if hasattr(module.initialize, _MARK):
        return
    module.initialize = _replace(module.initialize, functools.partial(_initialize, join))
    module.shutdown = _replace(module.shutdown, functools.partial(_shutdown, leave))


def guard(module: Any, join: Callable[[], None]) -> None:
    """Makes the program join the job, or fail, before it uses a backend of JAX.

    With JAXHET_AUTO=join, `is_initialized` of `module`, which is `jax.distributed`, joins as well.

    Args:
      module: The module.
      join: `jaxhet.initialize`.
    """
    pid = os.getpid()
    with contextlib.suppress(UsageError):  # the first use of a backend raises it
        config = _config.resolve()
        if not _is_job(config) or config.program_pid not in (None, pid):
            return
        _config.pass_on("program_pid", pid)
    first_use.call_before_backends(functools.partial(_before_first_use, pid, join))
    is_initialized = module.is_initialized

    @functools.wraps(is_initialized)
    def joined() -> bool:
        if _config.resolve().auto == "join":
            _before_first_use(pid, join)
        return is_initialized()

    module.is_initialized = joined


def _before_first_use(pid: int, join: Callable[[], None]) -> None:
    """Joins the job if JAXHET_AUTO=join, else raises. Does nothing in other processes than `pid`.

    Raises:
      UsageError: The program has not joined.
    """
    from jaxhet import _session

    config = _config.resolve()
    if _session.used.is_set() or _session.current() is not None or not _is_job(config):
        return
    if os.getpid() != pid or _is_of_multiprocessing():
        return
    if config.auto == "join":
        join()
    elif not _is_alone():
        who = "this process" if config.process_id is None else f"process {config.process_id}"
        raise UsageError(
            f"{who} uses JAX and has not joined the job: each process would compute for itself."
            " Call jax.distributed.initialize or jaxhet.initialize before any other use of JAX, or"
            " add --join to `jaxhet launch` or `jaxhet run` (JAXHET_AUTO=join), which joins for the"
            " program; with JAXHET_AUTO=0 the program runs outside of the job"
        )


def _is_of_multiprocessing() -> bool:
    """Whether Python's multiprocessing started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_alone() -> bool:
    """Whether the job has one process."""
    with contextlib.suppress(UsageError):
        return place.complete(_clusters.resolve()).num_processes == 1
    return False


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


def _initialize(
    join: Callable[..., None], original: Callable[..., None], given: Mapping[str, Any]
) -> None:
    """Joins the job; without a job, initializes JAX as JAX does."""
    from jaxhet import _session

    config = _config.resolve()
    if (session := _session.current()) is not None:
        session.check_alive()
        _check_same(session, without_address(config, _options(given)))
        return
    if not _is_job(config):
        original(**given)
        return
    options = without_address(config, _options(given))
    _log.apply(config)
    warn_of_certificates(given, _MTLS)
    join(**options)


def _shutdown(
    leave: Callable[[], None], original: Callable[..., None], given: Mapping[str, Any]
) -> None:
    """Leaves the job; without a job, shuts down as JAX does."""
    from jaxhet import _session

    if _session.current() is None:
        original(**given)
    else:
        leave()


def _is_job(config: _config.Config) -> bool:
    """Whether the environment says that this process belongs to a job of ours, and may join.

    Each of these is set for a job of jaxhet only.
    """
    if config.auto == "0":
        return False
    marks = (
        *("launched", "job_secret", "job_secret_file", "island", "islands"),
        *("coordinator_address", "coordinator_bind_address"),
    )
    return any(getattr(config, name) for name in marks)


def warn_of_certificates(given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Warns of the user's certificates for JAX's coordination service, which a job does not use."""
    if found := [name for name in names if given.get(name)]:
        _log.LOGGER.warning(
            "%s: a job of jaxhet makes certificates of its own for JAX's coordination service, and"
            " does not use these",
            ", ".join(found),
        )


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the arguments that the program gives.

    Raises:
      UsageError: An argument is unknown.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OPTIONS:
            options[_OPTIONS[name]] = value
        elif name not in _ALWAYS_MET:
            raise UsageError(
                f"jax.distributed.initialize was called with {name}={value!r}, which has no meaning"
                " in a job of several islands; leave it out"
            )
    ids = options.get("local_device_ids")
    if ids is not None:
        options["local_device_ids"] = (ids,) if isinstance(ids, int) else tuple(ids)
    return options


def without_address(config: _config.Config, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a program gives, without an address that the environment replaces.

    Args:
      config: The options of the environment.
      options: Our options, as the program gives them to `initialize`.

    Raises:
      UsageError: The program and the environment name different numbers or devices.
    """
    kept = dict(options)
    gpus = ("local_device_ids",) if config.launched else ()
    for name in (*_NUMBERS, *gpus):
        ours, given = getattr(config, name), options.get(name)
        if ours is None or given is None or given == ours:
            continue
        if name in gpus and len(given) == len(ours):
            kept.pop(name)  # the launcher deals the GPUs out, and numbers each process's anew
            continue
        raise UsageError(
            f"the program gives initialize {name}={given!r}, and the job was started with"
            f" JAXHET_{name.upper()}={_text(ours)}; leave the argument out, or give it this value"
        )
    ours, given = config.coordinator_address, kept.get("coordinator_address")
    if ours is not None and given not in (None, ours):
        kept.pop("coordinator_address")
        kept.pop("coordinator_bind_address", None)
        if not config.process_id:  # one line for all processes
            _log.apply(config)
            _log.LOGGER.info(
                "the coordinator of the job is at %s, by JAXHET_COORDINATOR_ADDRESS; %s, which the"
                " program gives, is not used",
                *(ours, given),
            )
    return kept


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_same(session: "Session", options: Mapping[str, Any]) -> None:
    """Checks that the arguments of a call after `jaxhet.initialize` agree with the job."""
    if session.is_pretended:
        return
    for name in _IDENTITY:
        ours, value = getattr(session.config, name), options.get(name)
        if value is not None and value != ours:
            raise UsageError(
                f"jax.distributed.initialize was called with {name}={value!r}, and this process is"
                f" in a job with {name}={ours!r} already; leave the argument out, or give it this"
                " value"
            )
