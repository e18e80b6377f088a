"""Comparison of the inputs of a run's processes, before the first step.

Each process sends what it was given, as one text for each name, over the devices of the job. All
processes therefore know all texts, and raise the same error.
"""

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxhet
from models.data import Batches
from models.extras.corpus import Corpus
from models.extras.options import Options
from models.train import Trainer

# Options that may differ between processes, and the reason. All others are compared.
MAY_DIFFER = {
    "data": "a path; the tokens are compared",
    "tokenizer": "a path; the tokenizer's digest is compared",
    "init_from": "a path; config and parameters are compared",
    "run_dir": "a path; all processes must see a file that process 0 writes there",
    "peak_flops": "a figure of the hardware, for the metrics that process 0 writes",
}
# Largest number of names, bytes of a value that are shown in an error, bytes of its digest.
_NAMES, _SHOWN, _DIGEST = 128, 56, 8
# Differences that an error names.
_TOLD = 4
# A file on a shared file system is seen by the other machines within this time, in seconds.
_SEEN_WITHIN_S = 10.0


def agreed(options: Options, corpus: Corpus, trainer: Trainer) -> dict[str, str]:
    """Texts that all processes of a run must have in common, by the names that errors show.

    Args:
      options: Options of the run.
      corpus: The training data.
      trainer: The trainer, with the model and the mesh.
    """
    given = {
        f"--{name.replace('_', '-')}": value
        for name, value in dataclasses.asdict(options).items()
        if name not in MAY_DIFFER
    }
    model = {f"{name} of the model": x for name, x in dataclasses.asdict(trainer.config).items()}
    found = {
        **given,
        "the data": f"{corpus.size} tokens, digest {corpus.sample()}",
        "the tokenizer": corpus.tokenizer or "bytes",
        "the initial parameters": parameters(options.init_from),
        **model,
        "the mesh": dict(trainer.mesh.shape),
        "the order of devices in the mesh": [d.id for d in trainer.mesh.devices.flat],
    }
    return {name: str(value) for name, value in found.items()}


def parameters(init_from: str | None) -> str:
    """Size and digest of the files of parameters, which are not read as a whole."""
    if init_from is None:
        return "random"
    path = Path(init_from)
    files = sorted(f for f in path.glob("*") if f.suffix == ".safetensors")
    maps = [
        np.memmap(f, np.uint8, "r") for f in files or [path] if f.is_file() and f.stat().st_size
    ]
    contents = Corpus(path.name, tuple(maps))
    return f"{contents.size} bytes, digest {contents.sample()}"


class Agreement:
    """Compares texts of all processes, which make the same calls. A single process does nothing."""

    def __init__(self) -> None:
        self._is_alone = jax.process_count() == 1
        if self._is_alone:
            return
        mesh = jaxhet.make_mesh({"rank": -1})
        self._devices = [*mesh.devices.flat]
        self._rows = NamedSharding(mesh, PartitionSpec("rank"))
        self._copy = jaxhet.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def require(self, mine: Mapping[str, str]) -> None:
        """Compares texts by name.

        Raises:
          ValueError: A process has another text; the error names it, and the processes.
        """
        if self._is_alone:
            return
        if found := difference([*mine], self._gather([*mine.values()])):
            raise ValueError(
                f"the processes of the job differ in {found}. Start all of them with the same"
                " options, data and code."
            )

    def require_shared(self, folder: Path) -> None:
        """Checks that all processes see one folder.

        Raises:
          ValueError: Some processes do not; the error names them.
          OSError: Process 0 can't write to the folder.
        """
        if self._is_alone:
            return
        is_first = jax.process_index() == 0
        token = f".shared-{secrets.token_hex(8)}" if is_first else ""
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        file = folder / self._gather([token])[0][0][2 * _DIGEST :]
        seen = self._gather([str(_appears(file))])
        if is_first:
            file.unlink()
        blind = [process for process, (text,) in enumerate(seen) if text != seen[0][0]]
        if blind:
            raise ValueError(
                f"{_processes(blind)} can't see the file that process 0 has written to --run-dir"
                f" {folder} within {_SEEN_WITHIN_S:g} s: the processes need one folder on a file"
                " system that all machines share. Give its path as --run-dir."
            )

    def _gather(self, texts: Sequence[str]) -> list[list[str]]:
        """Gathers each process's texts: a digest in hex, then the part that messages show."""
        row = np.zeros((1, _NAMES, _DIGEST + _SHOWN), np.uint8)
        for place, text in enumerate(texts):
            encoded = text.encode()
            packed = hashlib.sha256(encoded).digest()[:_DIGEST] + encoded[:_SHOWN]
            row[0, place, : len(packed)] = list(packed)
        shape = (jax.device_count(), *row.shape[1:])
        rows = jax.make_array_from_callback(shape, self._rows, lambda _: row)
        all_rows = np.asarray(jaxhet.block_until_ready(self._copy(rows)).addressable_data(0))
        row_of = {d.process_index: i for i, d in enumerate(self._devices)}
        return [
            [_unpack(all_rows[row_of[process], place].tobytes()) for place in range(len(texts))]
            for process in sorted(row_of)
        ]


def _unpack(packed: bytes) -> str:
    text = packed[_DIGEST:].rstrip(b"\0").decode(errors="ignore")
    return packed[:_DIGEST].hex() + text


def _appears(file: Path) -> bool:
    """Whether a file exists, or appears soon."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def difference(names: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    """Says which names have different texts on which processes; "" if none has. Pure.

    Args:
      names: Names of the texts.
      texts: Texts of each process, with their digests in front.
    """
    told = []
    for name, column in zip(names, zip(*texts, strict=True), strict=True):
        owners: dict[str, list[int]] = {}
        for process, text in enumerate(column):
            owners.setdefault(text, []).append(process)
        if len(owners) > 1:
            values = (f"{text[2 * _DIGEST :]} in {_processes(p)}" for text, p in owners.items())
            told.append(f"{name} ({', '.join(values)})")
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return "; ".join(told[:_TOLD]) + more


def _processes(numbers: Sequence[int]) -> str:
    """`process 1`, or `processes 1, 2 and 5 more`."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"process{'es' if len(numbers) > 1 else ''} {shown}{more}"


def first_rows(start: int, batches: Batches) -> dict[str, str]:
    """Texts of a run's first step and its rows, which all processes must have in common.

    Args:
      start: Number of the first step.
      batches: The run's batches.
    """
    rows = batches.rows(start, 0, batches.batch)
    return {
        "the newest checkpoint in --run-dir": str(start),
        "the rows of the first step": hashlib.sha256(rows.tobytes()).hexdigest(),
    }
