"""The train steps of `models/`, one for each way to run over islands, at sizes to compile."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from models.configs import Config
from models.train import Schedule, Trainer

_SCHEDULE = Schedule(learning_rate=1e-3, warmup=20, weight_decay=0.1, max_gradient_norm=1.0)
_SMALL = Config(
    layers=2,
    embed=256,
    query_heads=4,
    kv_heads=2,
    head_dim=64,
    hidden=512,
    vocab=64,
    dtype="bfloat16",
    scan=False,
)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A model on two islands of two devices; the first axes of the mesh cross islands."""

    axes: Mapping[str, int]
    config: Config = _SMALL
    batch: int = 32
    positions: int = 128

    def lower(self, devices: Mesh) -> Any:
        """Lowers the step for `devices`, whatever the axes of their mesh."""
        mesh = Mesh(devices.devices.reshape(tuple(self.axes.values())), tuple(self.axes))
        return Trainer(self.config, _SCHEDULE, mesh).lower(jax.jit, self.batch, self.positions)


def _small(**changes: Any) -> Config:
    return dataclasses.replace(_SMALL, **changes)


TRAIN_STEPS = {
    "data_parallel": TrainStep({"data": 4}),
    "fsdp": TrainStep({"fsdp": 4}, _small(layers=3)),
    "tensor_parallel": TrainStep({"data": 2, "model": 2}),
    "pipeline": TrainStep({"stage": 2, "data": 2}, _small(layers=4, stages=(3, 1))),
    "mixture_of_experts": TrainStep({"expert": 4}, _small(experts=4), batch=8),
}
