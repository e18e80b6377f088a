import jax
import pytest

import jaxhet
from models.configs import CONFIGS
from models.extras.flops import config_flops, model_flops, peak_flops
from models.train import Schedule, Trainer


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA GB200", None),
        ("cpu", None),
    ],
)
def test_peak_is_that_of_the_device(kind, peak):
    assert peak_flops(kind, "bfloat16") == peak
    assert peak_flops(kind, "float32") is None


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen", "tiny-qwen2"])
def test_matrices_of_a_config_are_those_of_its_model(name: str) -> None:
    config = CONFIGS[name]
    schedule = Schedule(1e-3, 2, weight_decay=0.1, max_gradient_norm=1.0)
    trainer = Trainer(config, schedule, jaxhet.make_mesh({"data": -1}))
    params = jax.eval_shape(lambda: trainer.init(0)).params
    sizes = {
        jax.tree_util.keystr(path): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    kernels = sum(size for path, size in sizes.items() if path.endswith("['kernel']"))
    tables = [size for path, size in sizes.items() if path.endswith("['embedding']")]
    matrices = kernels + (sum(tables) if config.tied else 0)  # a tied table is multiplied, too
    shape = (matrices, config.layers, config.query_heads, config.head_dim)
    assert config_flops(config, 32, 16) == model_flops(*shape, 32, 16)
