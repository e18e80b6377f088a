"""Training programs that others published run over islands, unmodified, as in plain JAX."""

import pathlib
import re

import pytest

from tests.support import published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_EXAMPLES = "flax-*/examples"
_NOTEBOOK = "equinox/docs/examples/parallelism.ipynb"
_FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
_GEMMA = (
    *("main.py", "--config=configs/tiny.py", "--config.vocab_size=34"),
    *("--config.num_train_steps=6", "--config.warmup_steps=2", "--config.num_eval_steps=2"),
    *("--config.per_device_batch_size=2", "--config.eval_per_device_batch_size=2"),
    *("--config.max_target_length=32", "--config.max_eval_target_length=32"),
    *("--config.max_corpus_chars=20000", "--config.prefetch_num_workers=0"),
    *("--config.save_checkpoints=False", "--config.restore_checkpoints=False"),
    "--config.use_bfloat16=False",
)
_IMAGENET = (
    *(str(published.HERE / "join_and_run.py"), "main.py", "--config=configs/default.py"),
    *("--config.model=_ResNet1", "--config.dataset=solid_colours", "--config.batch_size=8"),
    *("--config.num_train_steps=4", "--config.steps_per_eval=1", "--config.log_every_steps=1"),
    *("--config.profile=False", "--config.shuffle_buffer_size=16", "--config.prefetch=2"),
    "--config.warmup_epochs=1",
)

needs_flax = pytest.mark.skipif(
    bool(published.missing("packages", _EXAMPLES)),
    reason=published.missing("packages", _EXAMPLES) or "there",
)
needs_equinox = pytest.mark.skipif(
    bool(published.missing("packages", _NOTEBOOK)),
    reason=published.missing("packages", _NOTEBOOK) or "there",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variable by which TFDS finds the data sets of the examples."""
    folder = tmp_path_factory.mktemp("data")
    published.make_data(folder)
    return {**_FAST, "TFDS_DATA_DIR": str(folder)}


def _both(
    name: str,
    command: tuple[str, ...],
    data: dict[str, str],
    folder: pathlib.Path,
    fails: bool = False,
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[str]]:
    """Scalars of an example of Flax over two islands and in plain JAX, and what the four said."""
    run = published.Run(2, folder=published.find(_EXAMPLES) / name, fails=fails)
    scalars, texts = [], []
    for world in (published.over_islands, published.in_plain_world):
        workdir = folder / world.__name__
        arguments = [*command, f"--workdir={workdir}"]
        texts += world(arguments, data, run)
        scalars.append(published.scalars(workdir))
    return scalars[0], scalars[1], texts


def _assert_close(mine: dict[str, list[float]], world: dict[str, list[float]], *tags: str) -> None:
    for tag in tags:
        assert len(world[tag]) == len(mine[tag]) > 0
        assert mine[tag] == pytest.approx(world[tag], rel=2e-6), tag
        print(tag, mine[tag], world[tag])


@needs_flax
def test_gemma_of_flax_has_the_losses_of_plain_jax(
    data: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """Text generation, the last part, fails in plain JAX on several devices, and here alike."""
    mine, world, texts = _both("gemma", _GEMMA, data, tmp_path, fails=True)
    _assert_close(mine, world, "train_loss", "train_accuracy")
    losses = [re.findall(r"Finished training step \d+.* Loss: (\S+),", text) for text in texts]
    assert [len(each) for each in losses] == [6] * 4
    assert losses == [losses[0]] * 4
    for text in texts:
        assert "ValueError: Incompatible types for broadcasting" in text


@needs_flax
def test_imagenet_of_flax_by_pmap_has_the_losses_of_plain_jax(
    data: dict[str, str], tmp_path: pathlib.Path
) -> None:
    mine, world, _ = _both("imagenet", _IMAGENET, data, tmp_path)
    _assert_close(mine, world, "train_loss", "train_accuracy")
    assert len(set(world["train_loss"])) == 4


@needs_equinox
def test_parallelism_of_equinox_has_the_loss_of_plain_jax() -> None:
    command = [str(published.HERE / "join_and_run.py"), str(published.find(_NOTEBOOK))]
    run = published.Run(devices=8)
    worlds = (published.over_islands, published.in_plain_world)
    texts = [text for world in worlds for text in world(command, {}, run)]
    losses = [re.findall(r"^train loss=(.*)$", text, re.MULTILINE) for text in texts]
    assert len(losses) == 4
    assert losses[0]
    assert losses == [losses[0]] * 4
