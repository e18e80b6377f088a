"""Errors about clocks by which a certificate of the user is not valid."""

import dataclasses
import datetime
from collections.abc import Sequence

_MOST_S = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC).timestamp()


@dataclasses.dataclass(frozen=True)
class Clock:
    """Reading of a clock of the job.

    Attributes:
      owner: Name of the machine.
      now: Time by this clock.
    """

    owner: str
    now: datetime.datetime

    def __str__(self) -> str:
        return f"the clock of {self.owner} says {_text(self.now)}"


@dataclasses.dataclass(frozen=True)
class Validity:
    """Time in which a certificate is valid.

    Attributes:
      certificate: Name of the certificate and its owner.
      first: First moment.
      last: Last moment.
    """

    certificate: str
    first: datetime.datetime
    last: datetime.datetime

    def fault(self, now: datetime.datetime) -> str:
        """Reason why the certificate is not valid at a time; "" if it is."""
        if now < self.first:
            return "not yet valid"
        return "no longer valid" if now > self.last else ""


def time_from(seconds: float) -> datetime.datetime:
    """The time in a message, from seconds since 1970.

    Raises:
      ValueError: It is no time.
    """
    if not isinstance(seconds, int | float) or not 0 <= seconds < _MOST_S:
        raise ValueError(f"{seconds!r:.40} is no time")
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def explanation(clocks: Sequence[Clock], validities: Sequence[Validity]) -> str:
    """Words about the first certificate that is not valid by one of the clocks; "" without one.

    Args:
      clocks: The clocks of both ends, read at the same time.
      validities: The certificates of both ends.
    """
    for validity in validities:
        for clock in clocks:
            if fault := validity.fault(clock.now):
                others = [other for other in clocks if other is not clock]
                return (
                    f"{validity.certificate} is valid from {_text(validity.first)} to"
                    f" {_text(validity.last)}, and {'; '.join(map(str, (clock, *others)))}: it is"
                    f" {fault} by the clock of {clock.owner}. {_advice(clock, others, validity)}"
                )
    return ""


def _advice(clock: Clock, others: Sequence[Clock], validity: Validity) -> str:
    valid_by = [other.owner for other in others if not validity.fault(other.now)]
    if valid_by:
        return (
            f"Set the clock of {clock.owner}; if it is right, set the clock of"
            f" {' and '.join(valid_by)} and renew the certificate"
        )
    owners = " and ".join(each.owner for each in (clock, *others))
    return f"Set the clock of {owners}; if that is the time, renew the certificate"


def _text(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
