"""The model in a run's folder: what `models.pretrain` has trained, as other programs need it.

A run's folder holds `checkpoints/STEP/`, each with parameters, the optimizer's state and the facts
of the run. Only facts and parameters are read here; rows of zeros that fill up a short stage of a
pipeline are left out. The run's options (`config.yaml`) say which tokenizer it had.
"""

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
import yaml

from models.configs import CONFIGS, Config
from models.extras import initial
from models.extras.checkpoint import LAYOUT, Facts, read_facts, read_params, read_shapes
from models.extras.families import family_of
from models.extras.options import RESOLVED, Options
from models.extras.pipeline import Pipeline, parse_stages
from models.extras.text import Tokenizer
from models.huggingface import CHECKPOINTS, Params, parameter_shapes
from models.sharding import parameter_shardings, path_name


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run: `run` is the run's folder, `folder` the checkpoint's."""

    run: Path
    folder: Path

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """The checkpoint at `RUN/checkpoints/STEP`, or the newest of the run `RUN`.

        None if the path is neither.

        Raises:
          ValueError: The run has no such checkpoint.
        """
        path = path.absolute()
        is_step = path.parent.name == CHECKPOINTS and path.name.isdecimal()
        run = path.parent.parent if is_step else path
        if not (run / CHECKPOINTS).is_dir():
            return None
        steps = sorted(ocp.utils.checkpoint_steps(run / CHECKPOINTS))
        if not steps:
            raise ValueError(
                f"{run / CHECKPOINTS} has no complete checkpoint: let the run save one."
            )
        step = int(path.name) if is_step else steps[-1]
        if step not in steps:
            raise ValueError(
                f"{run / CHECKPOINTS} has no complete checkpoint of step {step}: take one of "
                f"{', '.join(map(str, steps))}."
            )
        return cls(run, run / CHECKPOINTS / str(step))

    @cached_property
    def facts(self) -> Facts:
        """The facts that the run saved with the state."""
        return read_facts(self.folder)

    @property
    def init_from(self) -> Path | None:
        """The folder with the parameters that the run started from."""
        found = self.facts["init_from"]
        return Path(found) if found else None

    @cached_property
    def config(self) -> Config:
        """The config of the model. Its vocabulary is the checkpoint's rows of embeddings.

        Raises:
          ValueError: The run's config is not known any more, or of no family of Hugging Face's.
        """
        options = Options(config=self.facts["config"], init_from=self.facts["init_from"])
        if not options.init_from and options.config not in CONFIGS:
            raise ValueError(
                f"{self.folder} has the config {options.config!r}; known configs are "
                f"{', '.join(CONFIGS)}."
            )
        rows = read_shapes(self.folder)["embed"]["embedding"].shape[0]
        config = dataclasses.replace(initial.config(options, rows), vocab=rows)
        given = self.facts.get("param_dtype") or config.param_dtype
        config = dataclasses.replace(config, param_dtype=given)
        family_of(config)
        return config

    def load(self, mesh: jax.sharding.Mesh) -> Params:
        """The parameters of all layers as they lie on `mesh`, whatever mesh the run had.

        Raises ValueError if the checkpoint's parameters do not fit `config`.
        """
        expected = parameter_shapes(self.config)
        found = read_shapes(self.folder)
        rows = jax.tree.leaves(found["blocks"])[0].shape[0]
        pipeline = Pipeline.of_rows(parse_stages(self.facts[LAYOUT]), rows, self.config.layers)
        stored = dict(expected)
        if pipeline:
            stored["blocks"] = jax.eval_shape(pipeline.spread, expected["blocks"])
        self._check(found, stored)
        params = read_params(self.folder, stored, parameter_shardings(stored, mesh))
        if pipeline:
            lies = parameter_shardings(expected, mesh)["blocks"]
            gather = jax.jit(pipeline.gather, out_shardings=lies)
            params = {**params, "blocks": gather(params["blocks"])}
        return params

    def _check(self, found: Params, expected: Params) -> None:
        theirs, ours = _shapes_by_name(found), _shapes_by_name(expected)
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"{self.folder}: {name} has shape {theirs.get(name)}, but {ours.get(name)} by "
                    f"the config {self.facts['init_from'] or self.facts['config']!r}, which has "
                    "changed since the run."
                )

    @property
    def is_of_bytes(self) -> bool:
        """Whether the run's tokens were bytes."""
        return not self._digest

    def tokenizer(self) -> str:
        """The `tokenizer.json` that made the run's tokens.

        Raises:
          ValueError: The run does not say which tokenizer it was, or the file has changed.
        """
        return Path(self._tokenizer()[0]).read_text(encoding="utf-8")

    def end(self) -> int | None:
        """The token that ends each document; None if documents end without one, as bytes do.

        Raises:
          ValueError: The tokenizer is not known, or its file has changed.
        """
        return None if self.is_of_bytes else self._tokenizer()[1].end

    def _tokenizer(self) -> tuple[str, Tokenizer]:
        path = initial.tokenizer(self._options())
        if path is None:
            raise ValueError(
                f"{self.run} had shards and no --tokenizer: copy the tokenizer.json that made them."
            )
        found = Tokenizer.load(path)
        if found.digest != self._digest:
            raise ValueError(f"{path} is not the tokenizer any more that made the run's tokens.")
        return path, found

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the run had another tokenizer than the model that it started from."""
        return self.init_from is None or self.is_of_bytes or bool(self._options().tokenizer)

    def _options(self) -> Options:
        """The tokenizer of the run's options, and what it started from."""
        path = self.run / RESOLVED
        contents: dict[str, Any] = yaml.safe_load(path.read_text()) if path.exists() else {}
        return Options(tokenizer=contents.get("tokenizer"), init_from=self.facts["init_from"])

    @property
    def _digest(self) -> str:
        """SHA-256 of the tokenizer, the last part of the corpus's identity; empty for bytes."""
        *_, last = self.facts["corpus"].split(":")
        return last if len(last) == 64 else ""


def _shapes_by_name(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
