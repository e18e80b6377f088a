"""Ten steps of Levanter's trainer on a small Llama; rows and parameters are sharded.

levanter_program.py FOLDER
"""

import sys
import time
from typing import Any

import haliax  # pyright: ignore[reportMissingImports]
import jax
import jmp  # pyright: ignore[reportMissingImports]
import numpy as np
from levanter import trainer as training  # pyright: ignore[reportMissingImports]
from levanter.checkpoint import CheckpointerConfig  # pyright: ignore[reportMissingImports]
from levanter.data.dataset import ListAsyncDataset  # pyright: ignore[reportMissingImports]
from levanter.data.text import datasets  # pyright: ignore[reportMissingImports]
from levanter.distributed import DistributedConfig  # pyright: ignore[reportMissingImports]
from levanter.models.llama import LlamaConfig  # pyright: ignore[reportMissingImports]
from levanter.optim.config import AdamConfig  # pyright: ignore[reportMissingImports]
from levanter.tracker.tracker import NoopConfig  # pyright: ignore[reportMissingImports]

_LLAMA = LlamaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


def _config(folder: str) -> Any:
    return training.TrainerConfig(
        id="small",
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        train_batch_size=8,
        num_train_steps=10,
        steps_per_eval=1000,
        require_accelerator=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),  # `main` has done it
        checkpointer=CheckpointerConfig(base_path=f"{folder}/checkpoints"),
        log_jaxprs=False,
        log_xla_hlo=False,
    )


def _data() -> Any:
    rows = np.random.default_rng(0).integers(0, 64, (80, 16)).astype(np.int32)
    examples = ListAsyncDataset([{"input_ids": row} for row in rows])
    causal = datasets.CausalLmDataset(examples, _LLAMA.max_Pos)
    return datasets.NamedLmDataset(causal, _LLAMA.max_Pos)


def _loss(model: Any, example: Any, *, key: Any = None) -> Any:
    return model.compute_next_token_loss(example, key=key)


def _print(info: Any) -> None:
    print("loss", info.step, repr(float(info.loss)), time.perf_counter(), flush=True)


def main() -> None:
    jax.distributed.initialize()
    config = _config(sys.argv[1])
    training.initialize(config)
    optimizer = AdamConfig(learning_rate=1e-2).build(config.num_train_steps)
    with training.Trainer(config, optimizer, _loss) as trainer:
        key = jax.random.PRNGKey(0)
        vocabulary = haliax.Axis("vocab", 64)
        state = trainer.initial_state(key, model_init=lambda: _LLAMA.build(vocabulary, key=key))
        trainer.add_hook(_print, every=1)
        trainer.train(state, trainer.data_loader(_data()).iter_from_step(0))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
