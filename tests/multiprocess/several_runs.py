"""`models.pretrain` in one job, once for each argument, which has the options of a run.

With the variable `LAYER_S` the config `tiny` has four layers, and each sleeps so many seconds.
"""

import dataclasses
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhet
from models import pretrain
from models.configs import CONFIGS
from models.extras.options import parse
from models.llama import Block

_compute = Block.__call__


def _sleep(_: Any) -> np.ndarray:
    time.sleep(float(os.environ["LAYER_S"]))
    return np.zeros((), np.float32)


def _sleep_and_compute(self: Block, x: jax.Array, documents: Any = None) -> jax.Array:
    """A layer whose forward pass begins with a sleep, also where it is computed again."""
    slept = jax.pure_callback(
        _sleep, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(x[0, 0, 0])
    )
    return _compute(self, x + jax.lax.stop_gradient(slept).astype(x.dtype), documents)


def main() -> None:
    if "LAYER_S" in os.environ:
        Block.__call__ = _sleep_and_compute
        CONFIGS["tiny"] = dataclasses.replace(CONFIGS["tiny"], layers=4)
    jaxhet.initialize()
    for words in sys.argv[1:]:
        pretrain.pretrain(parse(["--config=tiny", *words.split()]))
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
