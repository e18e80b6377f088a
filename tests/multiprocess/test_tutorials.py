"""The commands of the tutorials with the output that the pages show, and all programs of documents.

The program of the README and of the first tutorial is run by tests/python/test_project.py.
"""

import collections
import os
import pathlib
import re
import shlex
import sys

import pytest

from models.pretrain import parse
from tests.python.compiler.install_plugins import PLUGINS
from tests.support.commands import python
from tests.support.documents import FENCE

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAMS = {  # page -> number of its programs, all of which run here or in test_project.py
    "docs/guides/programs.md": 3,
    "docs/guides/replicas.md": 1,
    "docs/guides/testing.md": 2,
    "docs/guides/thin-links.md": 3,
    "docs/tutorials/01-two-islands.md": 1,
    "docs/tutorials/02-nvidia-and-amd.md": 1,
    "docs/tutorials/03-read-a-plan.md": 1,
    "docs/tutorials/05-failures.md": 1,
    "docs/tutorials/06-unequal-islands.md": 1,
    "README.md": 1,
}


def _blocks(page: str, info: str) -> list[str]:
    """The fenced blocks of a page whose first line has these words after the fence."""
    folder = "docs/guides" if (_ROOT / "docs" / "guides" / page).exists() else "docs/tutorials"
    fences = FENCE.findall((_ROOT / folder / page).read_text())
    return [text for words, text in fences if words == info]


def _run(command: str, folder: pathlib.Path, packages: pathlib.Path = _ROOT, **env: str) -> str:
    """Output of a command line of `jaxhet`, with a further folder of packages."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "jaxhet"
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    found = {"PATH": path, "PYTHONPATH": f"{_ROOT}{os.pathsep}{packages}"}
    env = {"JAX_PLATFORMS": "", "XLA_FLAGS": "", **found, **env}
    return python("-m", "jaxhet.cli", *arguments, folder=folder, env=env).stdout


def test_all_programs_in_documents_are_run() -> None:
    """A page with a new program needs a test here."""
    pages = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
    found = {
        str(page.relative_to(_ROOT)): sum(
            words.split(" ")[0] == "python" for words, _ in FENCE.findall(page.read_text())
        )
        for page in pages
    }
    assert collections.Counter(found) == collections.Counter(_PROGRAMS)


# Names that the programs of the guides and of the fifth tutorial use, and do not define.
_BEFORE = """
import jax
import jax.numpy as jnp
import jaxhet
import numpy as np

jaxhet.initialize()
mesh = jaxhet.make_mesh({"data": -1})
attention = lambda q, k, v: q * k + v
flash_attention = attention
q = k = v = jnp.ones(4)
first = jax.sharding.Mesh(jaxhet.islands()[0].devices, ("model",))
weights = jax.make_array_from_callback(
    (8,), jax.NamedSharding(first, jax.P("model")), lambda i: np.ones(8)[i], dtype=np.float32
)
state = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P()))
gradients = params = state
split = jax.NamedSharding(mesh, jax.P("data"))
update = lambda params, gradients: params - gradients
folder = "checkpoint"
save = lambda state, folder: print("saved")
"""
_PARTS = ("programs.md", "replicas.md", "05-failures.md")


def test_parts_of_programs_run(tmp_path: pathlib.Path) -> None:
    parts = [text for page in _PARTS for text in _blocks(page, "python")]
    assert len(parts) == len(_PARTS) + 2
    (tmp_path / "train.py").write_text("\n".join([_BEFORE, *parts, "jaxhet.shutdown()"]))
    command = "jaxhet launch --islands 2 --devices 4 -- python train.py"
    assert _run(command, tmp_path, JAX_PLATFORMS="cpu").count("saved") == 2


_BEFORE_THIN_LINKS = """
import jax
import jax.numpy as jnp
import jaxhet
import numpy as np
import optax

jaxhet.initialize()
step = lambda x: 2 * x
params = {"w": jnp.ones((8, 4))}
batch = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
loss = lambda params, rows: jnp.mean((rows @ params["w"] - 1) ** 2)
fragment = {"w": np.arange(16, dtype=np.float32).reshape(2, 8)}
"""
_AFTER_THIN_LINKS = """
print("trained", bool(jnp.isfinite(params["w"]).all() and (params["w"] != 1).all()))
print("arrived", bool(jnp.allclose(mean["w"], fragment["w"].mean(0), atol=1.0)))
jaxhet.shutdown()
"""


def test_programs_of_thin_links_run(tmp_path: pathlib.Path) -> None:
    parts = _blocks("thin-links.md", "python")
    program = "\n".join([_BEFORE_THIN_LINKS, *parts, _AFTER_THIN_LINKS])
    (tmp_path / "train.py").write_text(program)
    command = "jaxhet launch --islands 2 --devices 1 -- python train.py"
    output = _run(command, tmp_path, JAX_PLATFORMS="cpu")
    assert output.count("trained True") == 2
    assert output.count("arrived True") == 2


def test_example_of_a_test_passes(tmp_path: pathlib.Path) -> None:
    for text in _blocks("testing.md", "python"):
        (tmp_path / text.split()[1]).write_text(text)
    ended = python("-m", "pytest", "-p", "no:cacheprovider", "test_total.py", folder=tmp_path)
    assert "1 passed" in ended.stdout, ended.stdout


@pytest.mark.slow
def test_plan_of_the_tutorial_is_printed(tmp_path: pathlib.Path) -> None:
    if not PLUGINS.exists():
        pytest.skip(f"{PLUGINS} is missing: python tests/python/compiler/install_plugins.py")
    page = "03-read-a-plan.md"
    folder = tmp_path / "demo"
    folder.mkdir()
    (program,) = _blocks(page, 'python title="example.py"')
    (folder / "example.py").write_text(program)
    (shown,) = _blocks(page, "")
    command, _, output = shown.removeprefix("$ ").partition("\n")
    printed = _run(command, folder, PLUGINS)
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


@pytest.mark.slow
def test_training_of_the_tutorial_runs_and_resumes(tmp_path: pathlib.Path) -> None:
    *_, command = _blocks("04-parallelism.md", "")
    for _ in range(2):
        _run(command.replace("runs/tutorial", str(tmp_path / "run")), _ROOT)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.slow
def test_program_of_two_vendors_trains_on_islands_of_cpus(tmp_path: pathlib.Path) -> None:
    page = "02-nvidia-and-amd.md"
    (program,) = _blocks(page, "python")
    (tmp_path / "train.py").write_text(program)
    (command,) = (text for text in _blocks(page, "") if text.startswith("JAX_PLATFORMS=cpu "))
    output = _run(command.removeprefix("JAX_PLATFORMS=cpu "), tmp_path, JAX_PLATFORMS="cpu")
    lines = re.findall(r"^\[island0/0\] step (\d+): loss (\S+)$", output, re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(0, 100, 10))
    losses = [float(value) for _, value in lines]
    assert losses == sorted(losses, reverse=True)


def test_unequal_islands_of_the_tutorial_have_shares_and_equal_losses(
    tmp_path: pathlib.Path,
) -> None:
    page = "06-unequal-islands.md"
    (program,) = _blocks(page, 'python title="unequal.py"')
    (tmp_path / "unequal.py").write_text(program)
    (command,) = _blocks(page, "")
    output = _run(command, tmp_path, JAX_PLATFORMS="cpu")
    found = re.findall(r"^\[island0/0\] \((\d+), (\d+)\): .* loss (\S+)$", output, re.MULTILINE)
    (_, _, even), (fast, slow, measured) = found
    assert int(fast) > int(slow)
    assert int(fast) + int(slow) == 12
    assert float(measured) == pytest.approx(float(even), rel=1e-5)
    assert output.count("compilations: 1") == 2


def test_training_that_the_reader_kills_has_options_that_exist() -> None:
    """tests/faults/test_kill_training.py kills trainings and resumes them."""
    command, *_ = _blocks("05-failures.md", "")
    words = shlex.split(command.replace("\\\n", " "))
    options = parse(words[words.index("models.pretrain") + 1 :])
    assert (options.resume, options.checkpoint_every) == ("auto", 100)
