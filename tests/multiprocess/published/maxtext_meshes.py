"""Trains small models with MaxText, one mesh after the other, in the job that this process finds.

    maxtext_meshes.py FOLDER SAVED CASE...

Each process writes MaxText's metrics of a case to FOLDER/CASE.PROCESS. Case `restored` continues
case `saved`, whose checkpoints are in the folder SAVED, on another mesh.
"""

import os
import pathlib
from typing import Any

from absl import app
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

_COMMON = {
    "hardware": "gpu_multiprocess",
    "dataset_type": "synthetic",
    "steps": 10,
    "learning_rate_schedule_steps": 10,
    "learning_rate": 1e-2,
    "enable_checkpointing": False,
    "checkpoint_period": 1000,
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_target_length": 16,
    "per_device_batch_size": 2,
    "attention": "dot_product",
    "dtype": "float32",
    "sharding_tolerance": 1.0,
    "num_slices": 1,
    "ici_fsdp_parallelism": 1,
    "log_config": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "jax_cache_dir": "",
}
_EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 64,
    "sparse_matmul": False,
    "capacity_factor": -1,
}
# Axes before `tensor` cross islands first: `tensor` is inside an island.
CASES = {
    "data": {"ici_data_parallelism": 4},
    "fsdp": {"ici_fsdp_parallelism": 4},
    "tensor": {"ici_data_parallelism": 2, "ici_tensor_parallelism": 2},
    "expert": {**_EXPERTS, "ici_expert_parallelism": 4},
    "pipeline": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
    "slices": {"num_slices": 2, "dcn_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "saved": {"ici_fsdp_parallelism": 4, "steps": 6, "enable_checkpointing": True},
    "restored": {"ici_data_parallelism": 2, "ici_tensor_parallelism": 2},
}


def _rank() -> str:
    return os.environ.get("JAXHET_PROCESS_ID") or os.environ["OMPI_COMM_WORLD_RANK"]


def _without_slices(settings: dict[str, Any]) -> dict[str, Any]:
    """The same mesh in plain JAX, where the CPU devices of one host are one slice."""
    merged = {**settings, "num_slices": 1}
    for key in settings:
        if key.startswith("dcn_"):
            inside = key.replace("dcn_", "ici_")
            merged[inside] = merged.get(inside, 1) * merged.pop(key)
    return merged


def main(argv: list[str]) -> None:
    folder, saved = map(pathlib.Path, argv[1:3])
    for name in argv[3:]:
        settings = {
            **_COMMON,
            "run_name": name,
            "base_output_directory": folder / "runs",
            "metrics_file": folder / f"{name}.{_rank()}",
            **CASES[name],
        }
        if name == "restored":
            settings["enable_checkpointing"] = True
            steps = saved.glob("runs/saved/checkpoints/[0-9]*")
            last = max(steps, key=lambda path: int(path.name))
            settings["load_full_state_path"] = last / "items"
        if "JAXHET_PROCESS_ID" not in os.environ:
            settings = _without_slices(settings)
        train.main(["train.py", *(f"{key}={value}" for key, value in settings.items())])


if __name__ == "__main__":
    app.run(main)
