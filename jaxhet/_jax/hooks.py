"""Errors of the functions that XLA calls during a compilation."""

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxhet._errors import JaxhetError
from jaxhet._jax.replacements import install

Hook = Callable[[bytes], bytes | None]


def raising(hooks: Sequence[Hook]) -> list[Hook]:
    """Lets compilations raise the errors of these hooks, `KeyboardInterrupt` and `SystemExit` too.

    XLA passes on only their text, after a traceback.
    """
    raised = collections.deque[Exception](maxlen=16)

    def keeping(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def run(module: bytes) -> bytes | None:
            try:
                return hook(module)
            except Exception as error:
                raised.append(error)
                raise

        return run

    @install("jax._src.compiler:backend_compile_and_load")
    def compiled(compile_and_load: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_and_load(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            found = [own for own in raised if type(own).__name__ in text and str(own) in text]
            if not found:
                if (end := _end_of_program(text)) is not None:
                    raise end from None
                raise
            raised.remove(found[-1])
            if isinstance(found[-1], JaxhetError):
                found[-1].with_traceback(None)  # a fault of jaxhet keeps its traceback
            raise found[-1] from None

    return [keeping(hook) for hook in hooks]


def _end_of_program(text: str) -> BaseException | None:
    """The exception of a signal handler. Python runs handlers before the first line of a hook."""
    last = re.search(r"^(KeyboardInterrupt|SystemExit)(?:: (.*))?$", text, re.MULTILINE)
    if last is None:
        return None
    name, code = last.groups()
    if name == "KeyboardInterrupt":
        return KeyboardInterrupt()
    return SystemExit(int(code) if code and re.fullmatch(r"-?\d+", code) else code)
