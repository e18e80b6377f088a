import contextlib
import resource
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxhet
from models.extras.checkpoint import Checkpoints
from models.train import TrainState

LIMIT_BYTES = 100_000

# When one file of a save fails, Orbax closes its event loop while TensorStore still writes other
# files. TensorStore's callback then raises "Event loop is closed" on a thread of its own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def short_files():
    """Writes beyond `LIMIT_BYTES` of a file fail, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def held_commit(monkeypatch):
    """Saves are written but not completed before the event that this returns is set."""
    event, finalize = threading.Event(), ocp.CompositeCheckpointHandler.finalize

    def wait(handler, directory) -> None:
        assert event.wait(60)
        finalize(handler, directory)

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", wait)
    yield event
    event.set()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def random_state(size: int) -> TrainState:
    params = {"a": jax.random.normal(jax.random.key(0), (size,))}
    return TrainState(jnp.int32(1), params, ())


def shardings(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, state)


def test_save_that_fails_leaves_the_checkpoints_before(tmp_path, short_files):
    state = random_state(LIMIT_BYTES // 2)
    with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        short_files()
        words = (
            r"checkpoint of step 2 can't be written to .*; that of step 1 is kept: .*File too large"
            r".*Make room there, then start again with --resume"
        )
        checkpoints.save(2, state)
        with pytest.raises(OSError, match=words):
            checkpoints.wait()
        assert names(tmp_path) == ["1"]
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, state, shardings(state))
    np.testing.assert_array_equal(restored.params["a"], state.params["a"])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, held_commit):
    """A save returns before it is complete, and holds values whose arrays are donated meanwhile."""
    state = random_state(1 << 20)
    expected = np.array(state.params["a"])
    layout, shapes = shardings(state), jax.eval_shape(lambda: state)
    update = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(3):
            state = update(state)
        jax.block_until_ready(state)
        checkpoints.check()
        assert checkpoints.latest_step() is None
        held_commit.set()
        checkpoints.wait()
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, shapes, layout)
    np.testing.assert_array_equal(restored.params["a"], expected)


@pytest.fixture
def protected(monkeypatch):
    """The folders that `jaxhet.saving` protects."""
    folders = []

    @contextlib.contextmanager
    def saving(folder):
        folders.append(folder)
        try:
            yield
        finally:
            folders.remove(folder)

    monkeypatch.setattr(jaxhet, "saving", saving)
    return folders


def test_save_is_protected_until_it_is_complete(tmp_path, held_commit, protected):
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert not protected
        checkpoints.save(1, random_state(8))
        assert protected == [tmp_path]
        held_commit.set()
        checkpoints.wait()
        assert not protected


def test_save_that_fails_is_not_protected_any_more(tmp_path, short_files, protected):
    with Checkpoints(tmp_path, {}) as checkpoints:
        short_files()
        checkpoints.save(1, random_state(LIMIT_BYTES // 2))
        with pytest.raises(OSError, match=r"there is no earlier one: .*File too large"):
            checkpoints.wait()
    assert not protected
    assert not names(tmp_path)


def test_newest_are_kept_and_what_a_killed_run_left_is_deleted(tmp_path):
    state = random_state(8)
    for left in ("2.orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp.old"):
        (tmp_path / left / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, {}, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        assert not names(tmp_path)
        for step in (2, 9, 10, 11):
            checkpoints.save(step, state)
    assert names(tmp_path) == ["10", "11"]


def test_leaving_waits_for_the_last_save_unless_a_peer_has_failed(tmp_path, held_commit):
    def leave(step: int, error: BaseException) -> None:
        with checkpoints:
            checkpoints.save(step, random_state(8))
            raise error

    checkpoints = Checkpoints(tmp_path, {})
    with pytest.raises(jaxhet.PeerError):
        leave(1, jaxhet.PeerError("gone"))
    assert checkpoints.latest_step() is None
    held_commit.set()
    checkpoints.wait()
    with pytest.raises(KeyboardInterrupt):
        leave(2, KeyboardInterrupt())
    assert checkpoints.latest_step() == 2
