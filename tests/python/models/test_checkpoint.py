import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import Checkpoints
from models.train import TrainState

LIMIT_BYTES = 100_000


@pytest.fixture
def short_files():
    """Writes beyond `LIMIT_BYTES` of a file fail, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_that_fails_leaves_the_checkpoints_before(tmp_path, short_files):
    params = {"a": jax.random.normal(jax.random.key(0), (LIMIT_BYTES // 2,))}
    state = TrainState(jnp.int32(1), params, ())
    shardings = jax.tree.map(lambda x: x.sharding, state)
    with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        checkpoints.save(1, state)
        short_files()
        words = (
            r"checkpoint of step 2 can't be written to .*; that of step 1 is kept: .*File too large"
            r".*Make room there, then start again with --resume"
        )
        with pytest.raises(OSError, match=words):
            checkpoints.save(2, state)
        assert names(tmp_path) == ["1"]
    with Checkpoints(tmp_path, {}) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore(1, state, shardings)
    np.testing.assert_array_equal(restored.params["a"], params["a"])
