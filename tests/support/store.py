"""A double of the key-value store of JAX's coordination service."""

import threading

import jax


class Store:
    """The calls of JAX's client, on a dict; `values` are all values by their keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get_bytes(self, key: str) -> bytes:
        with self._changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.values[key]

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out\nmore")
            return self.values[key]
