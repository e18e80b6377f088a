"""Ten steps of Tunix's trainer on a small Llama 3 of random weights, over axes `fsdp` and `tp`."""

import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
from tunix.sft import hooks, peft_trainer, utils  # pyright: ignore[reportMissingImports]

_CONFIG = llama3.ModelConfig(
    num_layers=2,
    vocab_size=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
_ROWS = 8


class _Losses(hooks.TrainingHooks):
    """Prints the loss of each step and the time."""

    def on_train_start(self, trainer: Any) -> None: ...

    def on_train_end(self, trainer: Any) -> None: ...

    def on_train_step_start(self, trainer: Any) -> None: ...

    def on_eval_step_start(self, trainer: Any) -> None: ...

    def on_eval_step_end(self, trainer: Any, loss: float) -> None: ...

    def on_train_step_end(self, trainer: Any, step: int, loss: float) -> None:
        print("loss", step, repr(float(loss)), time.perf_counter(), flush=True)


def _inputs(batch: Any) -> dict[str, Any]:
    mask = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


@nnx.jit
def _model() -> Any:
    model = llama3.Llama3(_CONFIG, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def _batches() -> list[Any]:
    """Rows of this process: axis `fsdp` has an index for each process."""
    tokens = np.random.default_rng(7).integers(1, 64, (11, _ROWS, 16)).astype(np.int32)
    each = _ROWS // jax.process_count()
    mine = tokens[:, jax.process_index() * each :][:, :each]
    return [
        peft_trainer.TrainingInput(input_tokens=rows, input_mask=np.ones(rows.shape, bool))
        for rows in mine
    ]


def main() -> None:
    jax.distributed.initialize()
    auto = (jax.sharding.AxisType.Auto,) * 2
    with jax.make_mesh(
        (jax.process_count(), jax.local_device_count()), ("fsdp", "tp"), axis_types=auto
    ):
        config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=10)
        trainer = peft_trainer.PeftTrainer(_model(), optax.adamw(1e-2), config)
        trainer.with_gen_model_input_fn(_inputs)
        trainer.with_training_hooks(_Losses())
        trainer.train(_batches())
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
