import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention
from models.attention import attend, choose


def inputs(dtype) -> list[jax.Array]:
    shapes = ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    return [
        jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_attention_is_that_of_float32(dtype, with_mask):
    mask = jnp.tril(jnp.ones((1, 5, 5), bool), -1).at[:, 0, 0].set(True) if with_mask else None
    narrow = jax.jit(attend)(*inputs(dtype), mask=mask)
    wide = attend(*(x.astype(jnp.float32) for x in inputs(dtype)), mask=mask)
    assert narrow.dtype == dtype
    np.testing.assert_allclose(
        narrow.astype(jnp.float32), wide, atol=4 * float(jnp.finfo(dtype).eps)
    )


@pytest.mark.parametrize(
    ("kinds", "dtype", "positions", "head_dim", "expected"),
    [
        (["NVIDIA H100", "NVIDIA H200"], "bfloat16", 512, 128, "cudnn"),
        (["NVIDIA H100", "AMD Instinct MI300X"], "bfloat16", 512, 128, "xla"),
        (["NVIDIA H100"], "float32", 512, 128, "xla"),
        (["NVIDIA H100"], "float16", 512, 100, "xla"),
        (["NVIDIA H100"], "float16", 512, 256, "xla"),
        (["NVIDIA H100"], "float16", 511, 128, "xla"),
        (["cpu"], "bfloat16", 512, 128, "xla"),
    ],
)
def test_cudnn_is_chosen_where_all_devices_have_it(
    kinds, dtype, positions, head_dim, expected, monkeypatch
):
    devices = [types.SimpleNamespace(device_kind=kind) for kind in kinds]
    monkeypatch.setattr(attention.jax, "devices", lambda: devices)
    assert choose(dtype, positions, head_dim) == expected


@pytest.mark.parametrize(
    ("platforms", "expected"), [(("cuda", "cuda"), "cudnn"), (("cuda", "rocm"), "xla")]
)
def test_in_a_job_all_islands_choose_alike(platforms, expected, monkeypatch):
    islands = [types.SimpleNamespace(platform=platform) for platform in platforms]
    monkeypatch.setattr(attention.jaxhet, "islands", lambda: islands)
    assert choose("bfloat16", 512, 64) == expected
