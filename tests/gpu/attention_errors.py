"""Errors of the attention that `auto` chooses on an NVIDIA GPU; exits with 1 if they are large.

    python tests/gpu/attention_errors.py

Each line: what was chosen, positions, query heads, key heads, head dimension; then the largest
error of the result and of the three gradients against float32, in units of XLA's in bfloat16.
"""

import sys

import jax
import jax.numpy as jnp

from models.attention import attend, choose

SHAPES = ((256, 8, 8, 64), (256, 8, 2, 128), (200, 4, 1, 64), (101, 4, 2, 64), (2, 4, 4, 128))
MOST = 3.0


def results(implementation: str, cotangent: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
    """Attention of queries, keys and values, and its gradient from `cotangent`; as float32."""

    def run(cotangent: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        mixed, pull_back = jax.vjp(lambda *x: attend(*x, implementation=implementation), *inputs)
        return [x.astype(jnp.float32) for x in (mixed, *pull_back(cotangent))]

    return jax.jit(run)(cotangent, *inputs)


def main() -> int:
    failures = 0
    host = jax.devices("cpu")[0]
    for positions, heads, key_heads, size in SHAPES:
        keys = jax.random.split(jax.random.key(positions), 4)
        inputs = [
            jax.random.normal(key, (2, positions, count, size), jnp.bfloat16)
            for key, count in zip(keys, (heads, heads, key_heads, key_heads), strict=True)
        ]
        right = jax.device_get(
            results("xla", *(jax.device_put(x, host).astype(jnp.float32) for x in inputs))
        )
        chosen = choose(jnp.bfloat16, positions, size)
        assert chosen == ("xla" if positions % 2 else "cudnn")
        errors = [
            [
                float(jnp.max(jnp.abs(a - b)))
                for a, b in zip(results(name, *inputs), right, strict=True)
            ]
            for name in ("auto", "xla")
        ]
        ratios = [a / max(b, 1e-3) for a, b in zip(*errors, strict=True)]
        failures += max(ratios) > MOST
        print(
            chosen,
            positions,
            heads,
            key_heads,
            size,
            " ".join(f"{r:.2f}" for r in ratios),
            flush=True,
        )
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
