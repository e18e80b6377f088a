"""Writes small data sets, in the form of TFDS, that the examples of Flax read.

    data.py FOLDER

`lm1b` has sentences of random words. `solid_colours` has images of one colour each, and the label
is the colour: random crops of the example leave such images as they are.
"""

import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]

_WORDS = "the a one cat dog bird host rail sees moves finds sends no far old new red and to in"
_COLOURS = ((250, 20, 20), (20, 250, 20), (20, 20, 250), (240, 240, 20))


def _sentences(count: int, seed: int) -> Iterator[tuple[int, dict[str, str]]]:
    rng = random.Random(seed)
    for i in range(count):
        yield i, {"text": " ".join(rng.choices(_WORDS.split(), k=rng.randint(4, 12))) + " ."}


def _images(count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for i in range(count):
        label = i % len(_COLOURS)
        image = np.broadcast_to(np.array(_COLOURS[label], np.uint8), (64, 64, 3)).copy()
        yield i, {"image": image, "label": label}


def _store(folder: pathlib.Path, name: str, version: str, features: Any, **splits: Any) -> None:
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version=version,
        features=tfds.features.FeaturesDict(features),
        split_datasets=splits,
        data_dir=folder,
        file_format="array_record" if name == "lm1b" else "tfrecord",
        disable_shuffling=True,
    )


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    _store(
        folder,
        "lm1b",
        "1.1.0",
        {"text": tfds.features.Text()},
        train=_sentences(2000, 0),
        test=_sentences(100, 1),
    )
    image = tfds.features.Image(shape=(64, 64, 3), encoding_format="jpeg")
    _store(
        folder,
        "solid_colours",
        "1.0.0",
        {"image": image, "label": tfds.features.ClassLabel(num_classes=4)},
        train=_images(64),
        validation=_images(16),
    )


if __name__ == "__main__":
    main()
