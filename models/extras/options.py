"""The options of a run: one table, read from the command line and from YAML."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from models.attention import ATTENTIONS
from models.configs import CONFIGS, DTYPES, PIPELINES, REMAT
from models.data import ORDERS
from models.extras.usage import HelpFormatter

PROGRAM = "python -m models.pretrain"
# File with the options of a run, in its folder; `--config-file` reads it.
RESOLVED = "config.yaml"


def _option(default: Any, text: str, *, valid: str = "", **how: Any) -> Any:
    """An option of the command line.

    Args:
      default: Default value.
      text: Help text.
      valid: Valid values, a key of `_VALID`; empty: all values of the type.
      **how: Arguments of `add_argument`.
    """
    return dataclasses.field(
        default=default, metadata={"how": {"help": text, **how}, "valid": valid}
    )


# Valid values of numbers, in words.
_VALID: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda x: x >= 1,
    "at least 0": lambda x: x >= 0,
    "finite and at least 0": lambda x: 0 <= x < math.inf,
    "above 0": lambda x: x > 0,
    "between 0 and 1": lambda x: 0 < x < 1,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; each field is also an option of the command line."""

    config: str = _option("demo", "size of the model", choices=tuple(CONFIGS))
    init_from: str | None = _option(
        None, "Hugging Face's folder with config and parameters to start from"
    )
    steps: int = _option(
        200, "number of steps, including the steps before a resume", valid="at least 1"
    )
    seed: int = _option(0, "seed of parameters and batches", valid="at least 0")
    batch: int = _option(16, "rows in a batch, over all devices", valid="at least 1")
    seq: int = _option(128, "positions in a row, in tokens", valid="at least 1")
    mesh: str = _option(
        "data=-1,model=1",
        "mesh axes and their sizes, the outer axis first; -1: all devices that are left",
    )
    stages: str | None = _option(
        None,
        "layers of each pipeline stage, for example 3,1; or auto (chosen by measurement, so that"
        " unequal stages take equally long); default: equally many",
    )
    microbatches: int = _option(
        4, "parts of a batch that pass through the stages one after the other", valid="at least 1"
    )
    pipeline: str | None = _option(
        None,
        "order of microbatches in a pipeline: all forward, then all backward (gpipe), or each"
        " backward as early as possible (1f1b), which keeps few of them in memory and computes"
        " stages again; default: the config's",
        choices=PIPELINES,
    )
    accumulate: int = _option(
        1, "parts of a batch that are computed one after the other", valid="at least 1"
    )
    balance: str | None = _option(
        None,
        "number of microbatches for each position of the mesh axis data: even, numbers such as"
        " 3,1, or auto (chosen by measurement, so that unequal islands finish together). The mean"
        " of the numbers is --accumulate; default: all islands compute equal parts",
    )
    parts: str | None = _option(
        None,
        "with --balance, number of parts in which islands with little memory compute a microbatch,"
        " for example island1=2 or rocm=4; default: 1",
    )
    permute: int = _option(
        0, "seed of another order of devices and rows; 0: the usual order", valid="at least 0"
    )
    data: str | None = _option(
        None,
        "text, .jsonl or .parquet file, or a folder made by models.extras.tokenize; or a text that"
        " is in every Python: language-reference (default) or standard-library (some 20 times as"
        " long)",
    )
    tokenizer: str | None = _option(
        None,
        "tokenizer.json for a file of --data; default: the tokenizer of --init-from, or bytes",
    )
    order: str = _option(
        "windows",
        "random windows, or epochs of all rows, each time in another order",
        choices=ORDERS,
    )
    document_mask: bool = _option(
        False, "keep packed documents apart: attention and positions do not cross their ends"
    )
    eval_every: int = _option(
        0, "steps between evaluations; 0: none, and nothing is held out", valid="at least 0"
    )
    eval_part: float = _option(
        0.05, "last part of the data, which is held out for evaluations", valid="between 0 and 1"
    )
    eval_batches: int = _option(
        4, "batches of an evaluation, the same each time", valid="at least 1"
    )
    run_dir: str = _option("runs/pretrain", "folder for results, shared by all processes")
    resume: str = _option(
        "never",
        "auto: continue from the newest checkpoint in the run folder, if there is one; --resume"
        " without a value is auto",
        nargs="?",
        const="auto",
        choices=("auto", "never"),
    )
    checkpoint_every: int = _option(
        0, "steps between checkpoints; 0: only one at the end", valid="at least 0"
    )
    keep: int = _option(2, "newest checkpoints that are kept", valid="at least 1")
    learning_rate: float = _option(
        3e-3, "learning rate after the warm-up", valid="finite and at least 0"
    )
    warmup: int = _option(20, "steps of linear warm-up", valid="at least 0")
    schedule: str = _option(
        "constant", "learning rate after the warm-up", choices=("constant", "cosine")
    )
    cosine_steps: int = _option(0, "step at which the cosine ends; 0: --steps", valid="at least 0")
    weight_decay: float = _option(0.1, "decoupled weight decay", valid="finite and at least 0")
    max_gradient_norm: float = _option(
        1.0, "largest global norm of gradients; larger ones are scaled down to it", valid="above 0"
    )
    dtype: str | None = _option(
        None, "type to compute in; default: the config's", choices=(*DTYPES,)
    )
    param_dtype: str | None = _option(
        None, "type of parameters; default: the config's", choices=(*DTYPES,)
    )
    logits_dtype: str | None = _option(
        None, "type of the head's product; default: the config's", choices=(*DTYPES,)
    )
    moments_dtype: str = _option("float32", "type of the optimizer's moments", choices=(*DTYPES,))
    attention: str | None = _option(
        None, "implementation of attention; default: the config's", choices=ATTENTIONS
    )
    remat: str | None = _option(
        None,
        "activations of a block that are computed again in the backward pass: none, all (full), or"
        " all but products with parameters and cuDNN's attention (dots); default: the config's",
        choices=(*REMAT,),
    )
    loss_chunk: int | None = _option(
        None,
        "positions whose logits are in memory at a time; 0: all; default: the config's",
        valid="at least 0",
    )
    update: str = _option(
        "auto",
        "place where a parameter is updated: on each of its replicas (replicated), or each part on"
        " one device (sharded); auto: sharded if islands are unlike (jaxhet.unlike_islands)",
        choices=("auto", "sharded", "replicated"),
    )
    wire: str = _option(
        "",
        "codec of floats between islands, or codecs by mesh axis, as in JAXHET_WIRE: mxint8, or"
        " data=mxint8,fsdp=bf16; default: that variable",
    )
    diloco: bool = _option(
        False,
        "train each position of the mesh axis data for itself, and exchange outer gradients every"
        " --diloco-sync-period steps (DiLoCo); --wire is then their codec",
    )
    diloco_sync_period: int = _option(
        36, "steps from one exchange of a parameter to its next", valid="at least 1"
    )
    diloco_outer_lr: float = _option(
        0.7, "learning rate of the outer SGD with Nesterov momentum", valid="finite and at least 0"
    )
    diloco_outer_momentum: float = _option(
        0.9, "momentum of the outer SGD", valid="finite and at least 0"
    )
    num_diloco_fragments: int = _option(
        1, "parts of the parameters that are exchanged in turn", valid="at least 1"
    )
    num_communication_overlapping_steps: int = _option(
        0, "steps that go on beside an exchange, before its result is used", valid="at least 0"
    )
    on_difference: str = _option(
        "warn", "reaction to replicas that differ at a log line", choices=("warn", "sync", "raise")
    )
    log_every: int = _option(10, "steps between two log lines", valid="at least 1")
    peak_flops: float | None = _option(
        None,
        "peak FLOP/s of a device, for mfu; default: from a table of known devices",
        valid="above 0",
    )
    digest: bool = _option(False, "write digests of all parameters at each logged step")

    @property
    def decay_steps(self) -> int:
        """Step at which the cosine ends; 0: no cosine."""
        return (self.cosine_steps or self.steps) if self.schedule == "cosine" else 0

    def save(self, folder: Path) -> None:
        """Writes all options to `RESOLVED` in a folder, as `--config-file` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)
        (folder / RESOLVED).write_text(text)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line, and from the file that its `--config-file` names.

    Exits with a usage message if they are wrong. What the command line says overrides the file.
    """
    parser = _parser()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config-file", type=Path)
    given, rest = first.parse_known_args(arguments)
    try:
        words = _words(given.config_file) if given.config_file else []
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(f"--config-file {given.config_file}: {error}")
    values = vars(parser.parse_args([*words, *rest]))
    values.pop("config_file")
    options = Options(**values)
    for field in dataclasses.fields(Options):
        valid, value = field.metadata["valid"], getattr(options, field.name)
        if valid and value is not None and not _VALID[valid](value):
            parser.error(f"--{_flag(field.name)} must be {valid}, not {value}")
    if options.cosine_steps and options.schedule != "cosine":
        parser.error("--cosine-steps is of use with --schedule cosine only; give both")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        allow_abbrev=False,  # the parser before it would not know an abbreviated --config-file
        description="Pretrain a LLaMA or Qwen on text.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--config-file", help="YAML with any of these options, by their names")
    for field in dataclasses.fields(Options):
        how: dict[str, Any] = {"default": field.default, **field.metadata["how"]}
        if field.type is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif field.type in (float | None, int | None):
            how["type"] = float if field.type == float | None else int
        else:
            how["type"] = field.type if isinstance(field.type, type) else str
        parser.add_argument("--" + _flag(field.name), **how)
    parser.add_argument(
        "--no-resume",
        dest="resume",
        action="store_const",
        const="never",
        help="same as --resume never",
    )
    return parser


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _words(path: Path) -> list[str]:
    """The words of a command line that say what a YAML file says.

    Raises ValueError for a file that is no mapping of options to values.
    """
    contents = yaml.safe_load(path.read_text()) or {}
    if not isinstance(contents, dict):
        raise ValueError("no mapping of options to values, as `steps: 100`.")
    fields = {field.name: field for field in dataclasses.fields(Options)}
    words = []
    for key, value in contents.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(f"unknown option {key!r}; known options are {', '.join(fields)}.")
        flag = _flag(name)
        if fields[name].type is bool and isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words
