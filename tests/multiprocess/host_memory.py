"""Arrays in host memory, and with layouts that a program chooses, in programs that exchange.

    jaxhet launch --islands 2 -- python tests/multiprocess/host_memory.py

On GPUs and on CPU devices. Prints a line for each check; the last one is "all are right".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxhet

DEVICE = jax.memory.Space.Device
same = np.testing.assert_array_equal


class Checks:
    """A method for each check. Arrays have a block of three rows for each device."""

    def __init__(self, kind: str):
        self.mesh = jaxhet.make_mesh({"x": -1})
        self.split, self.whole = NamedSharding(self.mesh, P("x")), NamedSharding(self.mesh, P())
        self.split_host = self.split.with_memory_kind(kind)
        self.whole_host = self.whole.with_memory_kind(kind)
        self.rows = np.arange(self.mesh.size * 18, dtype=np.float32).reshape(-1, 6)
        self.x = self.put(self.rows, self.split)
        self.host = jax.device_put(self.x, self.split_host)

    def put(self, value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    def same(self, array: jax.Array, value: np.ndarray, sharding: Any) -> None:
        assert array.sharding == sharding, (array.sharding, sharding)
        for shard in array.addressable_shards:
            same(shard.data, value[shard.index])

    def argument(self) -> None:
        f = jax.jit(lambda h: jax.device_put(h, DEVICE).sum(0), out_shardings=self.whole)
        self.same(f(self.host), self.rows.sum(0), self.whole)

    def results(self) -> None:
        shardings = self.whole_host, self.whole, self.split_host
        f = jax.jit(lambda x: (x.sum(0), x.max(0), 2 * x), out_shardings=shardings)
        values = self.rows.sum(0), self.rows.max(0), 2 * self.rows
        for array, value, sharding in zip(f(self.x), values, shardings, strict=True):
            self.same(array, value, sharding)

    def returned_unchanged(self) -> None:
        f = jax.jit(lambda h, x: (x.sum(0), h), out_shardings=(self.whole, self.split_host))
        total, host = f(self.host, self.x)
        self.same(total, self.rows.sum(0), self.whole)
        self.same(host, self.rows, self.split_host)

    def donated(self) -> None:
        def f(h: jax.Array) -> jax.Array:
            x = jax.device_put(h, self.split)
            return jax.device_put(x + x.sum(0), self.split_host)

        host = jax.device_put(self.x, self.split_host)
        again = jax.jit(f, donate_argnums=0, out_shardings=self.split_host)(host)
        assert host.is_deleted()
        self.same(again, self.rows + self.rows.sum(0), self.split_host)

    def inside_jit(self) -> None:
        def f(x: jax.Array) -> jax.Array:
            host = jax.device_put(x + x.sum(0), self.split_host)
            return jax.device_put(host, self.split) * x.max()

        self.same(
            jax.jit(f, out_shardings=self.split)(self.x),
            (self.rows + self.rows.sum(0)) * self.rows.max(),
            self.split,
        )

    def optimizer_step(self) -> None:
        """Steps with the moments in host memory have the bits of steps without."""

        def step(w: Any, moment: Any, x: Any, place: NamedSharding) -> Any:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            moment = 0.9 * jax.device_put(moment, self.whole) + 0.1 * gradient
            return w - moment, jax.device_put(moment, place)

        states = []
        for place in (self.whole_host, self.whole):
            w = self.put(np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6), self.whole)
            moment = self.put(np.zeros((6, 6), np.float32), place)
            shardings = self.whole, place
            jitted = jax.jit(step, donate_argnums=(0, 1), static_argnums=3, out_shardings=shardings)
            for _ in range(3):
                w, moment = jitted(w, moment, self.x, place)
                assert moment.sharding == place
            states.append([np.asarray(a.addressable_data(0)) for a in (w, moment)])
        for host, device in zip(*states, strict=True):
            same(host, device)
        assert np.abs(states[0][1]).max() > 0

    def layers_of_a_loop(self) -> None:
        weights = np.stack([np.eye(6, dtype=np.float32) * k for k in (1, 2, 3)])

        def f(weights: jax.Array, x: jax.Array) -> jax.Array:
            body = lambda x, w: (x @ jax.device_put(w, DEVICE) + x.sum(0), None)  # noqa: E731
            return jax.lax.scan(body, x, weights)[0]

        want = self.rows
        for w in weights:
            want = want @ w + want.sum(0)
        got = jax.jit(f, out_shardings=self.split)(self.put(weights, self.whole_host), self.x)
        self.same(got, want, self.split)

    def columns_first(self) -> None:
        by_columns = Format(Layout(major_to_minor=(1, 0)), self.split)
        f = jax.jit(
            lambda x: (x.sum(0), 2 * x, x - x.max()),
            in_shardings=by_columns,
            out_shardings=(self.whole, by_columns, self.split),
        )
        total, double, rest = f(jax.device_put(self.x, by_columns))
        self.same(total, self.rows.sum(0), self.whole)
        self.same(double, 2 * self.rows, self.split)
        self.same(rest, self.rows - self.rows.max(), self.split)
        assert double.format.layout.major_to_minor == (1, 0)

    def layout_that_xla_chooses(self) -> None:
        any_layout = Format(Layout.AUTO, self.split)
        f = jax.jit(
            lambda x: (x.sum(0), 2 * x),
            in_shardings=any_layout,
            out_shardings=(self.whole, any_layout),
        )
        shape = jax.ShapeDtypeStruct(self.rows.shape, self.rows.dtype)
        compiled = f.lower(shape).compile()
        (of_argument,), _ = compiled.input_formats
        total, double = compiled(jax.device_put(self.x, of_argument))
        self.same(total, self.rows.sum(0), self.whole)
        self.same(double, 2 * self.rows, self.split)


def main() -> None:
    jaxhet.initialize()
    kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
    for kind in sorted(kinds - {"device"}):
        checks = Checks(kind)
        for name, check in vars(Checks).items():
            if name[0] != "_" and name not in ("put", "same"):
                check(checks)
                print(f"{kind}: {name}", flush=True)
    jaxhet.shutdown()
    print("all are right")


if __name__ == "__main__":
    main()
