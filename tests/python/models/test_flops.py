import pytest

from models.flops import peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI325X", 1307.4e12),
        ("NVIDIA GB200", None),
        ("cpu", None),
    ],
)
def test_peak_is_that_of_the_device(kind, peak):
    assert peak_flops(kind, "bfloat16") == peak
    assert peak_flops(kind, "float32") is None
