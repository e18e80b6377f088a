"""Requests of the training benchmarks to their processes: pure, without JAX."""

import dataclasses

# Rows for each device that leave most of a GPU's memory free, and the layers if not the config's:
# of an optimizer's state 16 bytes for each parameter are in memory, for each system once.
ROWS = {"tiny": 2, "demo": 4, "1b": 4, "8b": 2, "plain": 8, "plain-features": 8, "plain-tiny": 2}
LAYERS = {"8b": 6}
# Programs of benchmarks/plain_llama.py, beside the configs of models/. "plain-features" leaves the
# sharding of activations to XLA: with the axis `fsdp` they are split along their features.
PLAIN = ("plain", "plain-features", "plain-tiny")


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step.

    Attributes:
      config: a name in `models.configs.CONFIGS`, or in `PLAIN`.
      mesh: axes, as `fsdp=-1`; outer one first; -1: all devices that are left.
      scan: whether the program loops over its layers.
      batch: rows of a batch, over all devices.
      seq: positions of a row.
      dtype: a name in `models.configs.DTYPES`.
      layers: 0: those of the config.
      permute: seed of another order of devices and rows; 0: the usual order.
      learning_rate: after 20 steps of warm-up.
      data: path as in `models.extras.corpus.open_corpus`; None: Python's language reference.
      order: a name in `models.data.ORDERS`.
    """

    config: str
    mesh: str
    scan: bool
    batch: int
    seq: int
    dtype: str = "bfloat16"
    layers: int = 0
    permute: int = 0
    learning_rate: float = 3e-4
    data: str | None = None
    order: str = "windows"

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes with their sizes."""
        parts = (part.partition("=") for part in self.mesh.split(","))
        return {name: int(size or -1) for name, _, size in parts}

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices."""
        return self.batch * self.seq

    def on_one_of(self, islands: int) -> "Program":
        """The same work for each device, on the devices of one of so many islands."""
        first, *rest = self.axes.items()
        mesh = ",".join(f"{name}={size}" for name, size in ((first[0], -1), *rest))
        return dataclasses.replace(self, mesh=mesh, batch=self.batch // islands)


@dataclasses.dataclass(frozen=True)
class Built:
    """Cost and result of compiling a step; seconds are of one process.

    Attributes:
      trace_s: from Python to StableHLO.
      compile_s: from there to an executable; of it `pre_s` and `post_s` in the two passes,
        `between_s` from the end of PRE to the begin of POST, and `after_s` from the end of POST on.
      exchanges: number of exchanges that a rank starts in each step; `exchange_bytes` go to the
        other island.
      apart: the share of these bytes with matrix products scheduled between start and done.
      flops: operations of the model in a step, over all devices; see `models.extras.flops`.
    """

    trace_s: float
    compile_s: float
    pre_s: float = 0.0
    post_s: float = 0.0
    between_s: float = 0.0
    after_s: float = 0.0
    exchanges: int = 0
    exchange_bytes: int = 0
    apart: float = 0.0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trace:
    """Measurements of consecutive steps by one process.

    Attributes:
      island: index of the process's island; 0 in one world.
      seconds: time of each step, from the loss of the previous step to its own; the next batch is
        made in it.
      losses: one for each step, in nats per byte.
      exchanges: number of exchanges that the process's ranks started.
      bytes_sent: by transport, `local` included; empty in one world.
    """

    island: int
    seconds: list[float]
    losses: list[float]
    exchanges: int
    bytes_sent: dict[str, int]
