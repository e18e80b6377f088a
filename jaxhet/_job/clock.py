"""The coordinator's clock, as a process of the job reads it: the one clock of a trace."""

import dataclasses
import queue
import time
from collections.abc import Callable

_ROUND_TRIPS = 16
_ANSWER_TIMEOUT_S = 1.0  # for one round trip
_MOST_US = 1e18  # largest reading of a clock: 30,000 years


def now_us() -> float:
    """Monotonic clock of this machine, which the engine uses too, in microseconds."""
    return time.monotonic_ns() / 1e3


@dataclasses.dataclass(frozen=True)
class Reading:
    """The coordinator's clock at one moment. All times are in microseconds.

    Attributes:
      local_us: Time of this process's clock at that moment.
      offset_us: Coordinator's clock minus this process's.
      error_us: Largest error of the offset: half of the round trip.
    """

    local_us: float
    offset_us: float
    error_us: float


class CoordinatorClock:
    """Reads the coordinator's clock by questions and answers.

    The coordinator reads its clock at some moment between question and answer. The middle is wrong
    by half of the round trip at most, however long each way took (Cristian, "Probabilistic clock
    synchronization", 1989). So the shortest of several round trips is the best one.

    Args:
      ask: Sends a question with a number. `hear` takes the answer.
    """

    def __init__(self, ask: Callable[[int], None]):
        self._ask = ask
        self._number = 0
        self._answers: queue.SimpleQueue[tuple[int, float, float]] = queue.SimpleQueue()

    def hear(self, number: int, coordinator_us: float) -> None:
        """Takes an answer, on the thread that reads the connection.

        Raises:
          ValueError: The answer is no time.
        """
        heard_us = now_us()
        if not isinstance(coordinator_us, int | float) or not abs(coordinator_us) < _MOST_US:
            raise ValueError(f"{coordinator_us!r:.40} is no time")
        if number == self._number:  # others answer a question that was given up
            self._answers.put((number, coordinator_us, heard_us))

    def read(self) -> Reading | None:
        """The clock, by the shortest of several round trips; None if no answer arrives.

        One thread may call it at a time. It waits for each answer, up to 1 s.
        """
        readings: list[Reading] = []
        while len(readings) < _ROUND_TRIPS and (reading := self._read_once()) is not None:
            readings.append(reading)
        return min(readings, key=lambda reading: reading.error_us, default=None)

    def _read_once(self) -> Reading | None:
        self._number += 1
        asked_us = now_us()
        self._ask(self._number)
        while True:
            try:
                number, coordinator_us, heard_us = self._answers.get(timeout=_ANSWER_TIMEOUT_S)
            except queue.Empty:
                return None
            if number == self._number:
                middle_us = (asked_us + heard_us) / 2
                return Reading(middle_us, coordinator_us - middle_us, (heard_us - asked_us) / 2)
