"""Ten steps of Kauldron's trainer on a small network, its parameters divided over all devices."""

import sys
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd  # pyright: ignore[reportMissingImports]

_ROWS, _FEATURES = 16, 32


class _Rows:
    """Rows of numbers and their targets, as a data source of Grain."""

    def __init__(self) -> None:
        self._x = np.random.default_rng(7).standard_normal((_ROWS * 11, _FEATURES), np.float32)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        x = self._x[int(row)]
        return {"x": x, "y": np.sin(3 * x)}


class _Network(nn.Module):
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(_FEATURES)(nn.gelu(nn.Dense(64)(x)))


class _Losses(kd.train.metric_writer.NoopWriter):
    """Prints the loss of each step and the time."""

    def write_step_metrics(self, *, step: int, aux: Any, **_: Any) -> None:
        with jax.transfer_guard("allow"):
            losses = aux.compute(flatten=False).loss_values
        print("loss", step, repr(float(losses["total"])), time.perf_counter(), flush=True)


def main() -> None:
    jax.distributed.initialize()
    trainer = kd.train.Trainer(
        seed=0,
        workdir=sys.argv[1],
        train_ds=kd.data.py.DataSource(
            data_source=_Rows(), shuffle=False, batch_size=_ROWS, num_workers=0
        ),
        model=_Network(),
        optimizer=optax.adam(1e-2),
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
        num_train_steps=9,
        log_metrics_every=1,
        sharding=kd.sharding.ShardingStrategy(
            params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
        ),
        writer=_Losses(),
    )
    trainer.train()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
