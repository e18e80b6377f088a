"""The errors that jaxhet raises: one tree; those in `BY_NAME` come from C++ as well.

See `xla_plugin/base/error.h`.
"""


class JaxhetError(Exception):
    """Base of every error of jaxhet."""


class UsageError(JaxhetError):
    """The job, a program or an option is not one that jaxhet can run.

    The text says what to change.
    """


class PlanMismatchError(JaxhetError):
    """Two islands compiled or ran programs whose exchanges differ; nothing was moved."""


class PeerError(JaxhetError):
    """Another process died, stopped answering or left the job."""


class DeadlineError(JaxhetError):
    """A connected peer did not take part in an exchange in time."""


class TransportError(JaxhetError):
    """A path between two processes could not be set up or broke."""


class DeviceError(JaxhetError):
    """A device, its driver or its memory refused a request."""


class ReplicaError(JaxhetError):
    """Replicas of a value have other bits on some devices than on the first one."""


BY_NAME: dict[str, type[JaxhetError]] = {
    cls.__name__: cls
    for cls in (
        UsageError,
        PlanMismatchError,
        PeerError,
        DeadlineError,
        TransportError,
        DeviceError,
    )
}

for _cls in (JaxhetError, ReplicaError, *BY_NAME.values()):
    _cls.__module__ = "jaxhet"  # where users find them, and what tracebacks print


def to_json(error: JaxhetError) -> list[str]:
    """Class name and text of an error, for a message."""
    return [type(error).__name__, str(error)]


def from_json(failure: list[str]) -> JaxhetError:
    """The error in a message. If this version does not know its class, a JaxhetError."""
    name, text = failure
    return BY_NAME.get(name, JaxhetError)(text)
