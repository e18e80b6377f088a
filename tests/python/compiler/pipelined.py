"""Runs random programs with loops, with exchanges pipelined and not, and compares all bits.

A process of its own: `pipelined.py [SEED ...]` prints a line of JSON for each program: its name,
then the moved exchanges and the differences. The islands are pretended; XLA does the exchanges.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxhet.compiler import Job, Options, collectives, hlo, pipeline
from tests.python.compiler import gpu_on_cpu
from tests.python.compiler.one_process import World

_ISLANDS = ((0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 1))
_LEAST_ITERATIONS = 4


class PipeliningWorld(World):
    """Pipelines exchanges; without fusions, as modules for GPUs are before their own passes.

    Attributes:
      num_moved: Collectives that were pipelined since the last look.
    """

    num_moved: int = 0

    def decomposed_for_gpus(self, module: bytes, job: Job) -> bytes | None:
        for opcode in ("dynamic-slice", "dynamic-update-slice", "compare", "add"):
            module = gpu_on_cpu.unfused(module, opcode)
        if self.options.pipeline_iterations:
            parsed = hlo.Module(module)
            crossing = collectives.crossing(parsed, job)
            moved = pipeline.pipeline(parsed, crossing, self.options.pipeline_iterations)
            self.num_moved += len(moved)
        decomposed = super().decomposed_for_gpus(module, job)
        return None if decomposed is None else gpu_on_cpu.with_copies(decomposed)

    def run(self, program: "Program", islands: tuple[int, ...] | None, iterations: int) -> Any:
        """The program's results, compiled anew."""
        options = Options(
            bucket_bytes=program.bucket_bytes, part_bytes=64, pipeline_iterations=iterations
        )
        with self.compiled_as(islands, options, as_gpu=True):
            step, arguments = program.step()
            return jax.tree.map(np.asarray, step(*arguments))


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose values and gradients stay small in any number of layers."""
    return jnp.sign(x @ w)


def _product_forward(x: jax.Array, w: jax.Array) -> Any:
    return product(x, w), (x, w)


def _product_backward(saved: Any, dy: jax.Array) -> Any:
    x, w = saved
    return jnp.sign(dy @ w.T), x.T @ jnp.clip(dy, -2, 2)


product.defvjp(_product_forward, _product_backward)


@dataclasses.dataclass(frozen=True)
class Program:
    """The gradients of layers in a loop; whole numbers, so that sums are exact in any order.

    Attributes:
      is_sharded: Weights are sharded over the batch's axis and gathered for each layer.
      shape: The mesh; the batch is split over its first axis.
    """

    layers: int
    width: int
    dtype: str
    shape: tuple[int, int]
    is_sharded: bool
    is_reversed: bool
    unroll: int
    has_vector: bool
    has_constant: bool
    is_nested: bool
    bucket_bytes: int
    islands: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> "Program":
        """A program by its number."""
        rng = np.random.default_rng(seed)

        def chance(p: float = 0.5) -> bool:
            return bool(rng.random() < p)

        return cls(
            layers=int(rng.integers(2, 12)),
            width=int(rng.choice([4, 8, 12])),
            dtype=str(rng.choice(["float32", "bfloat16"])),
            shape=((4, 1), (2, 2))[int(chance())],
            is_sharded=chance(),
            is_reversed=chance(),
            unroll=2 if chance(0.2) else 1,
            has_vector=chance(),
            has_constant=chance(),
            is_nested=chance(0.25),
            bucket_bytes=int(rng.choice([0, 64, 4096])),
            islands=_ISLANDS[int(rng.integers(len(_ISLANDS)))],
        )

    def values(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """Weights and rows."""
        rng = np.random.default_rng(self.layers)

        def values(*shape: int) -> Any:
            return jnp.asarray(rng.integers(-1, 2, shape), self.dtype)

        n, w = self.layers, self.width
        weights = {"w": values(n, w, w)} | ({"b": values(n, w)} if self.has_vector else {})
        return weights, values(8, w)

    def function(self, mesh: Mesh) -> tuple[Any, tuple[dict[str, NamedSharding], NamedSharding]]:
        """The jitted function on a mesh data, model, and the shardings of its arguments."""
        spec = {"w": P(None, "data") if self.is_sharded else P(), "b": P()}
        names = ("w", "b") if self.has_vector else ("w",)
        shardings = {name: NamedSharding(mesh, spec[name]) for name in names}
        rows = NamedSharding(mesh, P("data"))

        def layer(x: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
            if self.is_sharded:
                gathered = lax.with_sharding_constraint(weight["w"], NamedSharding(mesh, P()))
                weight = {**weight, "w": gathered}
            x = lax.with_sharding_constraint(product(x, weight["w"]), rows)
            x = x + weight.get("b", 0)
            return x, (x * 2).sum(0) if self.has_constant else None

        def layers(x: jax.Array, weights: Any) -> Any:
            return lax.scan(layer, x, weights, reverse=self.is_reversed, unroll=self.unroll)

        def loss(weights: Any, x: jax.Array) -> Any:
            if self.is_nested:
                x, ys = lax.scan(lambda x, _: layers(x, weights), x, None, length=5)
            else:
                x, ys = layers(x, weights)
            return x.astype(jnp.float32).sum() + sum(
                y.astype(jnp.float32).sum() for y in [ys] if y is not None
            )

        step = jax.jit(
            jax.value_and_grad(loss),
            in_shardings=(shardings, rows),
            out_shardings=(None, shardings),
        )
        return step, (shardings, rows)

    def step(self) -> tuple[Any, tuple[Any, ...]]:
        """The compiled function and its arguments."""
        mesh = Mesh(np.array(jax.devices()).reshape(self.shape), ("data", "model"))
        step, shardings = self.function(mesh)
        return step, jax.device_put(self.values(), shardings)


def main(seeds: list[int]) -> None:
    compiler = PipeliningWorld.make()
    for seed in seeds:
        program = Program.of(seed)
        plain = compiler.run(program, None, 0)
        apart = compiler.run(program, program.islands, 0)
        compiler.num_moved = 0
        pipelined = compiler.run(program, program.islands, _LEAST_ITERATIONS)
        failures = []
        for name, other in (("plain", plain), ("not pipelined", apart)):
            same = jax.tree.map(
                lambda a, b: a.tobytes() == b.tobytes() and np.isfinite(a.astype(float)).all(),
                pipelined,
                other,
            )
            if not all(jax.tree.leaves(same)):
                failures.append(f"{name}: {same}")
        result = {"moved": compiler.num_moved, "failures": failures, "program": str(program)}
        print(json.dumps([f"seed {seed}", result]), flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
