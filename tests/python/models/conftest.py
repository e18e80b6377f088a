"""The models are tested on four CPU devices of one ordinary process."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxhet
from models.train import Schedule, Trainer

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


# A CPU client with two threads for each device, as `jaxhet.initialize` sets for jobs: with one for
# each, a loop that starts many programs can deadlock, and XLA ends the process. It is made here,
# because tests of other folders create a client before a fixture of this folder runs.
with pytest.MonkeyPatch.context() as _patch:
    _patch.setenv("PJRT_NPROC", "8")
    jax.devices()

SCHEDULE = Schedule(learning_rate=1e-2, warmup=2, weight_decay=0.1, max_gradient_norm=1.0)


def loss_and_gradients(
    trainer: Trainer, tokens: jax.Array, jit: Any = jax.jit, by: Callable[..., Any] | None = None
) -> tuple[float, Any]:
    """Loss and gradients of a trainer's first parameters on its mesh, as NumPy has them.

    Args:
      trainer: The trainer.
      tokens: A batch.
      jit: Function to compile with.
      by: Function of parameters and tokens, instead of the gradient of the trainer's loss.
    """
    shardings = trainer.state_shardings().params
    with jax.set_mesh(trainer.mesh):
        params = jit(lambda: trainer.init(3).params, out_shardings=shardings)()
        loss, gradients = jit(by or jax.value_and_grad(trainer.loss))(params, tokens)
    return float(loss), jax.tree.map(np.asarray, gradients)


def assert_close(found: Any, expected: Any, rtol: float = 1e-3) -> None:
    """Checks that trees have the same numbers, up to a relative difference in each."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), found, expected
    )


# LLVM's optimizations are most of a small program's compile time, and change no program of HLO.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@pytest.fixture
def fast_jit():
    """`jax.jit` that compiles fast to slow code."""
    return functools.partial(jax.jit, compiler_options=FAST_COMPILE)


@pytest.fixture
def compile_fast(monkeypatch: pytest.MonkeyPatch, fast_jit: Any) -> None:
    """Programs of models/ compile fast to slow code."""
    monkeypatch.setattr(jaxhet, "jit", fast_jit)


@pytest.fixture
def x64():
    """JAX's 64-bit types, for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def make_mesh():
    """Builds a mesh over the first devices: `make_mesh(data=2, model=2)`."""

    def make(**axes: int) -> jax.sharding.Mesh:
        sizes = tuple(axes.values())
        devices = np.array(jax.devices()[: int(np.prod(sizes))])
        return jax.sharding.Mesh(devices.reshape(sizes), tuple(axes))

    return make
