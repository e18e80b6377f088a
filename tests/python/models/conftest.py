"""The models are tested on four CPU devices of one ordinary process."""

import functools

import jax
import numpy as np
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session", autouse=True)
def two_threads_for_each_device() -> None:
    """Creates the CPU client with them: with one each, runs ahead of collectives can deadlock.

    XLA then ends the process. `jaxhet.initialize` does the same for jobs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_NPROC", "8")
        jax.devices()


# LLVM's optimizations are most of a small program's compile time, and change no program of HLO.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@pytest.fixture
def fast_jit():
    """`jax.jit` that compiles fast to slow code."""
    return functools.partial(jax.jit, compiler_options=FAST_COMPILE)


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
