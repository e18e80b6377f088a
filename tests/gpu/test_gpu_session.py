"""The session on real GPUs: two islands, also with a plugin of another name (mirror_double.py).

As `vendor` one island's devices are AMD's for the engine, too, by way of the double.
"""

import os
import re

import pytest

from tests.gpu.scripts_on_gpus import ON_GPUS, require_gpus
from tests.support.commands import launch, python
from tools.programs import hip_double


@pytest.mark.timeout(600)
@pytest.mark.parametrize("double", ["", "mirror", "vendor"])
def test_session_on_gpus(double: str):
    require_gpus("cuda")
    env = {**ON_GPUS, "NCCL_DEBUG": "INFO"}
    for name, value in (hip_double() if double == "vendor" else {}).items():
        env[name] = os.pathsep.join(filter(None, (value, os.environ.get(name))))
    job = launch("--islands=2", "--devices=1")
    options = ["--double", double] if double else []
    ended = python(*job, "tests/gpu/session_smoke.py", *options, env=env, timeout_s=580)
    print(ended.stdout)
    over_islands = re.findall(r".*NCCL INFO.* nranks (?!1\b).*", ended.stdout + ended.stderr)
    assert not over_islands, "XLA opened a communicator of its own over both islands"
