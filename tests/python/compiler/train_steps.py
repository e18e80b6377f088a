"""The train steps of `models/`, one for each way to run over islands, at sizes to compile."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh

from models.configs import CONFIGS, Config
from models.extras import pipeline
from models.train import Schedule, Trainer

_SCHEDULE = Schedule(learning_rate=1e-3, warmup=20, weight_decay=0.1, max_gradient_norm=1.0)
# Layers of the width that people train: what XLA overlaps depends on how long products take.
_MODEL = dataclasses.replace(CONFIGS["1b"], layers=2, scan=False, remat="none")


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A model on two islands; the first axes of the mesh cross them.

    `layers` is the number of layers of this island's stage, where stages differ.
    """

    axes: Mapping[str, int]
    config: Config = _MODEL
    batch: int = 16
    positions: int = 2048
    microbatches: int = 0  # shared unequally, if there are any
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layers: int = 0

    def lower(self, devices: Mesh) -> Any:
        """Lowers the step for `devices`, whatever the axes of their mesh."""
        mesh = Mesh(devices.devices.reshape(tuple(self.axes.values())), tuple(self.axes))
        sizes = (self.batch, self.positions, self.microbatches)
        # Without a job each process is of the "island" that its platform names.
        by_island = (("cpu", self.layers),) if self.layers else ()

        def stages_by_island(*_: Any) -> Any:  # a plain function: jaxhet describes it
            return by_island

        with mock.patch.object(pipeline, "_by_island", stages_by_island):
            return Trainer(self.config, _SCHEDULE, mesh, parts=self.parts).lower(jax.jit, *sizes)


def _with(**changes: Any) -> Config:
    return dataclasses.replace(_MODEL, **changes)


# On islands of two devices.
TRAIN_STEPS = {
    "data_parallel": TrainStep({"data": 4}),
    # Nothing comes before the gathers of the first layer: there must be some more.
    "fsdp": TrainStep({"fsdp": 4}, _with(layers=6)),
    "fsdp_recomputed": TrainStep({"fsdp": 4}, _with(layers=6, remat="full")),
    "tensor_parallel": TrainStep({"data": 2, "model": 2}),
    # One island has less memory, and computes each microbatch in two parts.
    "balanced": TrainStep({"data": 2, "fsdp": 2}, batch=32, microbatches=8, parts={"rocm": 2}),
    "pipeline": TrainStep({"stage": 2, "data": 2}, _with(layers=4, stages=(3, 1)), layers=3),
    "mixture_of_experts": TrainStep({"expert": 4}, _with(experts=4)),
}
# On islands of one device. If the exchanges before the loop over layers were still in flight when
# it begins, they and its own would be more than XLA's scheduler allows.
LOOP_OVER_LAYERS = TrainStep(
    {"fsdp": 2},
    dataclasses.replace(CONFIGS["tiny"], scan=True, remat="none"),
    batch=4,
    positions=32,
)
