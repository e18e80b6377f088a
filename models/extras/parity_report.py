"""The report of `models.parity`: Markdown, and a plot."""

import dataclasses
import math
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from models.extras import initial, options
from models.extras.corpus import open_corpus
from models.extras.parity_runs import (
    GRADIENT_TOLERANCES,
    NOISE_FLOORS,
    ONE_WORLD,
    Parity,
    Result,
    Rows,
    is_floor,
)
from models.extras.records import differences


@dataclasses.dataclass(frozen=True)
class Origin:
    """Commit, text and machine of a report.

    Attributes:
      commit: commit of this program, with a note if files differ from it.
      text: name of the training text.
      tokens: number of tokens of the text.
      digest: SHA-256 of the tokens; the digest of the file for a text of bytes.
      cpus: number of CPUs of the machine.
      load: mean number of processes that wanted a CPU in the minute before the first run.
    """

    commit: str
    text: str
    tokens: int
    digest: str
    cpus: int
    load: float

    @classmethod
    def of(cls, parity: Parity) -> Self:
        """The origin of a report that is about to be made. Reads the whole text."""
        given = options.parse(parity.training)
        corpus = open_corpus(given.data, initial.tokenizer(given))
        load, _, _ = os.getloadavg()
        cpus = os.cpu_count() or 1
        return cls(commit(), corpus.name, corpus.size, corpus.digest(), cpus, round(load, 1))


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the checkout that `folder` and this file are part of."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=9", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git checkout)"


_HEADINGS = (
    *("mesh", "run", "last loss", "loss: largest difference", "last", "gradient norm: largest"),
    *("last", "replicas", "tokens/s", "result"),
)


def report(parity: Parity, results: Sequence[Result], origin: Origin) -> str:
    """The results as Markdown.

    Args:
      parity: The comparison.
      results: The results, a line for each.
      origin: Commit and training text.
    """
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *(_line(result) for result in results)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    command = shlex.join(["python", "-m", "models.parity", *parity.words()])
    unlike = f"; the last one of unlike islands with `{parity.unlike}`" if parity.unlike else ""
    where = f"{parity.islands} islands of {parity.devices} {parity.platform} devices{unlike}"
    gradient = GRADIENT_TOLERANCES * parity.tolerance
    return f"""# Loss parity

`{command}`: {where}.

{table}

Made at commit {origin.commit}. Training text: {origin.text}, {origin.tokens:,} tokens, SHA-256
`{origin.digest}`.

Differences are relative to the one world's: the largest of all steps, and the one of the last step.
The noise floor is the largest difference of the permuted worlds ({parity.permutations} for a mesh),
which differ by rounding alone. That of unlike islands includes one world of the other arithmetic.
The loss of islands may differ by {parity.tolerance:.0e}. The loss of unlike islands
may also differ by {NOISE_FLOORS:g} noise floors. Norms of gradients may be {gradient:.0e} away, or
{NOISE_FLOORS:g} noise floors of their own. Replicas: how many
pieces of parameters were compared over devices, by SHA-256, and how many comparisons of an array
the run made itself.

{_speed(parity, origin)}

![Loss, and its difference to the one world's, over the step](curves.png)
"""


def _speed(parity: Parity, origin: Origin) -> str:
    """A sentence about tokens/s: not comparable if the machine had anything else to do."""
    shared = f"{origin.load:g} processes wanted the {origin.cpus} CPUs before the first run"
    if parity.jobs > 1:
        shared += f", and {parity.jobs} runs were made at a time"
    if parity.jobs > 1 or origin.load > 1:
        return f"Tokens/s (median of the steps) are **not comparable**: {shared}."
    return f"Tokens/s: median of the steps; {shared}."


def _line(result: Result) -> tuple[str, ...]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    replicas = ""
    if result.replicas is not None:
        equal = (
            "equal" if not (result.replicas.differences or result.num_different) else "NOT equal"
        )
        replicas = f"{result.replicas.compared:,} + {result.num_checked:,} {equal}"
    if result.failures:
        outcome = f"FAILED: {'; '.join(result.failures)}"
    elif result.allowed is None:
        no_bar = "reference" if result.replicas is None else "no bar"
        outcome = "noise floor" if is_floor(result.run) else no_bar
    else:
        outcome = f"passes (at most {result.allowed:.0e})"
    return (
        f"`{result.mesh}`",
        result.run,
        text(result.loss, ".5f"),
        text(result.largest, ".1e"),
        text(result.final, ".1e"),
        text(result.gradient, ".1e"),
        text(result.gradient_final, ".1e"),
        replicas,
        text(result.tokens_per_s, ",.0f"),
        outcome,
    )


def plot(path: Path, rows: Mapping[str, Mapping[str, Rows]]) -> None:
    """Draws losses and their differences for each mesh, as a PNG."""
    from matplotlib.figure import Figure  # only here: everything else does without it

    figure = Figure(figsize=(10, 0.6 + 3.0 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (mesh, runs), (losses, apart) in zip(rows.items(), panels, strict=True):
        one = runs.get(ONE_WORLD, [])
        for number, (run, mine) in enumerate(runs.items()):
            color = f"C{number}"
            steps = [row["step"] for row in mine]
            wide = {"linewidth": 4, "alpha": 0.35} if run == ONE_WORLD else {"linewidth": 1.0}
            losses.plot(steps, [row["loss"] for row in mine], label=run, color=color, **wide)
            if run != ONE_WORLD and len(mine) == len(one):
                values = differences(*([row["loss"] for row in each] for each in (mine, one)))
                # Zero has no place on a logarithmic axis. The legend has runs of zeros alone.
                label = None if any(values) else f"{run}: equal in all steps"
                shown = [value or math.nan for value in values]
                apart.plot(steps, shown, color=color, linewidth=1.0, label=label)
        losses.set(title=mesh, xlabel="step", ylabel="loss (nats per token)")
        apart.set(title=mesh, xlabel="step", ylabel="relative difference", yscale="log")
        for axes in (losses, apart):
            axes.grid(alpha=0.3)
        losses.legend(fontsize="small")
        if apart.get_legend_handles_labels()[1]:
            apart.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")
