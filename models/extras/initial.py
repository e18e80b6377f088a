"""Start of a run: a named size with random parameters, or a Hugging Face folder."""

import dataclasses
import math
from pathlib import Path

from models import huggingface
from models.configs import CONFIGS, Config
from models.extras import text
from models.extras.options import Options
from models.train import Params, Trainer

# A vocabulary is filled up to a multiple of this, to be split evenly.
_VOCAB_MULTIPLE = 128


def config(options: Options, vocab: int) -> Config:
    """The config that the options name, with room for tokens below `vocab`.

    Parameters of a folder are trained as float32, whatever type they have there.

    Raises:
      ValueError: the folder's model has fewer rows of embeddings than there are tokens.
    """
    if options.init_from is None:
        named = CONFIGS[options.config]
        rows = math.ceil(vocab / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        return dataclasses.replace(named, vocab=max(named.vocab, rows))
    found = huggingface.read_config(Path(options.init_from))
    if vocab > found.vocab:
        raise ValueError(
            f"the data has tokens up to {vocab - 1}, and the model of {options.init_from} has "
            f"{found.vocab} rows of embeddings: give the model's own tokenizer (--tokenizer), or "
            "shards that it made."
        )
    return dataclasses.replace(found, param_dtype="float32")


def tokenizer(options: Options) -> str | None:
    """The tokenizer that the options name, or of the folder that a run starts from."""
    if options.tokenizer or options.init_from is None:
        return options.tokenizer
    found = text.find_tokenizer(Path(options.init_from))
    return str(found) if found else None


def parameters(folder: str, trainer: Trainer) -> Params:
    """The parameters in a folder, as they lie on the trainer's mesh."""
    fields = dataclasses.fields(Config)
    changes = {field.name: getattr(trainer.config, field.name) for field in fields}
    return trainer.place(huggingface.load(Path(folder), trainer.mesh, **changes)[1])
