"""Conversion of models between Hugging Face's folders and checkpoints of JAX.

    python -m models.convert import Llama-3.2-1B checkpoint
    python -m models.convert export checkpoint Llama-3.2-1B-tuned
    python -m models.convert export runs/first SmolLM2-135M-tuned

A checkpoint is a folder with the model's files of text (`config.json`, the tokenizer's) and its
parameters as Orbax stores them, which any mesh can restore. A run of `models.pretrain` is exported
from its folder, where the newest checkpoint is read, or from `checkpoints/STEP` in it.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import orbax.checkpoint as ocp

import jaxhet
from models.configs import DTYPES, Config
from models.extras import text, trained
from models.huggingface import (
    CONFIG,
    PARAMS,
    Params,
    config_json,
    load,
    parameter_shapes,
    read_config,
    save,
)
from models.pretrain import parse_mesh
from models.sharding import parameter_shardings

PROGRAM = "python -m models.convert"

# Files of text and of tokenizers; weights in any form, and folders, stay behind.
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "USE_POLICY*")


def import_model(
    source: Path, target: Path, mesh: jax.sharding.Mesh, *, dtype: str | None = None
) -> None:
    """Makes a checkpoint of a Hugging Face folder.

    Args:
      source: Hugging Face's folder.
      target: Folder to make.
      mesh: Mesh that the parameters are loaded on.
      dtype: Type of the checkpoint's parameters; None: as in `source`.

    Raises:
      ValueError: `target` exists already.
    """
    _check_new(target)
    config, params = load(source, mesh, **({"param_dtype": dtype} if dtype else {}))
    target.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((target / PARAMS).absolute(), params)
    _copy_texts(source, target)
    theirs = json.loads((target / CONFIG).read_text())
    theirs.pop("torch_dtype", None)
    (target / CONFIG).write_text(json.dumps({**theirs, "dtype": config.param_dtype}, indent=2))


def export_model(source: Path, target: Path, mesh: jax.sharding.Mesh) -> None:
    """Makes a Hugging Face folder.

    Args:
      source: Checkpoint of `import_model`, or a run of `models.pretrain`.
      target: Folder to make.
      mesh: Mesh that the parameters are loaded on.

    Raises:
      ValueError: `target` exists already.
    """
    _check_new(target)
    run = trained.Checkpoint.find(source)
    if run:
        _export_run(run, target, mesh)
        return
    config, params = restore(source, mesh)
    like = config_json(source)
    _copy_texts(source, target)
    save(target, config, params, like=like)


def _export_run(run: trained.Checkpoint, target: Path, mesh: jax.sharding.Mesh) -> None:
    """Makes a folder of a run's model, with the tokenizer of the run."""
    config, params = run.config, run.load(mesh)
    like = {"max_position_embeddings": run.facts["seq"]}
    if run.init_from:
        like = config_json(run.init_from)
    if run.init_from and not run.has_own_tokenizer:
        _copy_texts(run.init_from, target)
    else:
        like = {**like, **_special(run)}
    save(target, config, params, like=like)
    _write_tokenizer(run, target / text.TOKENIZER)


def _special(run: trained.Checkpoint) -> dict[str, int | None]:
    """The special tokens of a run with a tokenizer of its own, as in `config.json`.

    `transformers` has other ones where the keys are absent.
    """
    try:
        end = run.end()
    except (ValueError, OSError):  # `_write_tokenizer` says why
        end = None
    return {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}


def _write_tokenizer(run: trained.Checkpoint, path: Path) -> None:
    """Writes the tokenizer of a run, or says why not."""
    if path.exists():
        return
    try:
        tokenizer = text.byte_tokenizer_json() if run.is_of_bytes else run.tokenizer()
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: no tokenizer.json is written: {error}", file=sys.stderr)
        return
    path.write_text(tokenizer, encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(kind, indent=2))


def restore(checkpoint: Path, mesh: jax.sharding.Mesh) -> tuple[Config, Params]:
    """The config of a checkpoint and its parameters as they lie on `mesh`."""
    config = read_config(checkpoint)
    shapes = parameter_shapes(config)
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        parameter_shardings(shapes, mesh),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return config, checkpointer.restore((checkpoint / PARAMS).absolute(), target)


def _check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already: give the name of a new folder.")


def _copy_texts(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, target)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with one line of text for an input that can't be used."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("import", "make a checkpoint"), ("export", "make a Hugging Face folder")):
        command = commands.add_parser(name, help=what)
        command.add_argument("source", type=Path, help="folder or run to read")
        command.add_argument("target", type=Path, help="folder to make")
        command.add_argument(
            "--mesh",
            default="fsdp=-1",
            help="mesh axes that parameters are split over; -1: all devices",
        )
        if name == "import":
            command.add_argument(
                "--dtype", choices=(*DTYPES,), help="type of parameters; default: the folder's"
            )
    options = vars(parser.parse_args(arguments))
    convert = {"import": import_model, "export": export_model}[options.pop("command")]
    try:
        convert(**options | {"mesh": jaxhet.make_mesh(parse_mesh(options["mesh"]))})
    except (ValueError, OSError, jaxhet.UsageError) as error:
        sys.exit(f"{PROGRAM}: {error}")


if __name__ == "__main__":
    main()
