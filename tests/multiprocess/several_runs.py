"""Runs of `models.pretrain` in one job. Each argument holds the options of one run.

With `suggest` as the first argument, runs `models.suggest` with the other arguments instead. If the
variable `LAYER_S` is set, the config `tiny` has four layers. Each layer sleeps `LAYER_S` seconds
forward and twice as long backward. The variable is a number, or the name of a file with a number.
"""

import dataclasses
import os
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhet
from models import pretrain, suggest
from models.configs import CONFIGS
from models.extras.options import parse
from models.llama import Block

_compute = Block.__call__


def _after_sleep(times: int, x: jax.Array) -> jax.Array:
    """The value of `x`, after so many times the seconds of a layer."""

    def sleep(_: Any) -> np.ndarray:
        path = pathlib.Path(os.environ["LAYER_S"])
        time.sleep(times * float(path.read_text() if path.exists() else path.name))
        return np.zeros((), np.float32)

    slept = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0, 0])
    return x + slept.astype(x.dtype)


@jax.custom_vjp
def _sleep(x: jax.Array) -> jax.Array:
    return _after_sleep(1, x)


_sleep.defvjp(lambda x: (_after_sleep(1, x), None), lambda _, g: (_after_sleep(2, g),))


def _sleep_and_compute(self: Block, x: jax.Array, documents: Any = None) -> jax.Array:
    return _compute(self, _sleep(x), documents)


def main() -> None:
    if "LAYER_S" in os.environ:
        Block.__call__ = _sleep_and_compute
        CONFIGS["tiny"] = dataclasses.replace(CONFIGS["tiny"], layers=4)
    if sys.argv[1] == "suggest":
        del sys.argv[1]
        suggest.main()
        return
    jaxhet.initialize()
    for words in sys.argv[1:]:
        pretrain.pretrain(parse(["--config=tiny", *words.split()]))
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
