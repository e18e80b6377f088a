"""An engine that does nothing: it notes its calls, and fails when it is told to."""

import threading
from typing import Any

from jaxhet._errors import JaxhetError, PeerError


class FakeEngine:
    """Stands for the extension's engine in a session.

    Attributes:
      calls: Calls that change something, in their order.
      failed: Set when the job has failed.
    """

    def __init__(self) -> None:
        self.session = 5
        self.calls: list[Any] = []
        self.failed = threading.Event()
        self._text = ""

    def set_ranks(self, ranks: list[Any]) -> None:
        self.calls.append(("set_ranks", [rank[2:] for rank in ranks]))

    def open_devices(
        self,
        platform: str,
        devices: list[Any],
        sockets: list[Any],
        timeout_s: float,
        later: list[tuple[int, int]],
    ) -> None:
        self.calls.append(("open_devices", platform, devices, sockets, timeout_s, later))

    def error(self) -> JaxhetError | None:
        return PeerError(self._text) if self.failed.is_set() else None

    def wait_failure(self, timeout_ms: int) -> tuple[str, str] | None:
        return ("PeerError", self._text) if self.failed.wait(min(timeout_ms, 20) / 1000) else None

    def peer_stats(self) -> list[dict[str, Any]]:
        return []

    def fail(self, code: str, text: str) -> None:
        del code
        self._text = text
        self.failed.set()

    def close(self, timeout_ms: int) -> None:
        self.calls.append(("close", timeout_ms))
