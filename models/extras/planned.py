"""A training step of `models.pretrain` for `jaxhet plan`: what it would exchange.

    PRETRAIN="--config 1b --mesh fsdp=4" \
        jaxhet plan --islands 2 --devices 2 models.extras.planned:step

`PRETRAIN` holds options of `python -m models.pretrain`, written as for a shell.
"""

import os
import shlex
import sys
from typing import Any

import jaxhet
from models.extras.options import PROGRAM, parse
from models.extras.shares import num_microbatches
from models.pretrain import make_trainer

OPTIONS = "PRETRAIN"
TARGET = "models.extras.planned:step"


def step() -> Any:
    """The lowered step. Exits with one line of text for options that can't be used."""
    options = parse(shlex.split(os.environ.get(OPTIONS, "")))
    try:
        trainer = make_trainer(options)
        parts = num_microbatches(options, trainer.mesh)
        return trainer.lower(jaxhet.jit, options.batch, options.seq, parts)
    except (ValueError, OSError, jaxhet.UsageError) as error:
        sys.exit(f"{PROGRAM}: {error}")
