"""The CUDA compiler's kernels of training steps: over two islands, and in one world."""

import collections
import re

import pytest

from jaxhet.compiler import Options
from tests.python.compiler import worker
from tests.python.compiler.hlo_text import decomposed, job
from tests.python.compiler.test_deviceless import require_compiler

_OPTIONS = Options(one_world_kernels=True)
_TWO = job(0, 1, platform="cuda")


@pytest.mark.timeout(300)
def test_steps_over_two_islands_can_have_the_kernels_of_one_world():
    require_compiler("cuda")
    steps = worker.run("one_world.py", timeout_s=280)
    assert len(steps) == 4
    for name, results in steps.items():
        world, islands, kept = map(collections.Counter, results)
        assert world.total() > 80, name
        assert kept == world, (name, kept - world, world - kept)
        # XLA fuses a sum of jaxhet's with the operations around it where it can.
        assert islands != world, name


@pytest.mark.parametrize("options", [_OPTIONS, Options()])
def test_barriers_are_around_each_collective_and_each_result_of_it(options: Options):
    text = decomposed(
        """
        p = f32[4] parameter(0)
        q = s32[6] parameter(1)
        both = (f32[4], s32[6]) all-reduce(p, q), channel_id=1, replica_groups={{0,1}},
          use_global_device_ids=true, to_apply=sum
        first = f32[4] get-tuple-element(both), index=0
        second = s32[6] get-tuple-element(both), index=1
        x = f32[4] multiply(first, first)
        y = s32[6] multiply(second, second)
        ROOT t = (f32[4], s32[6]) tuple(x, y)
        """.replace(",\n          ", ", "),
        _TWO,
        options,
    )
    hidden = re.findall(r"multiply\(%opt-barrier|multiply\(%jaxhet.opt-barrier", text)
    assert len(hidden) == (2 if options.one_world_kernels else 0), text
