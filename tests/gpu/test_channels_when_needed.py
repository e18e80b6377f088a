"""Device channels that only a program opens, between GPUs in different places of two islands."""

import pytest

from tests.faults.watched import WatchedJob
from tests.gpu.scripts_on_gpus import require_gpus
from tests.multiprocess.two_islands import SET_UP

# Sums over rails while the program that needs other channels is compiled.
_SCRIPT = """
from jaxhet import _session
data = np.arange(4 * 100_000, dtype=np.float32).reshape(4, -1)
x = put(data)
total = jax.jit(lambda v: jnp.sum(v, axis=0))
swapped = jax.jit(jax.shard_map(
    lambda v: jax.lax.ppermute(v, "x", [(i, 3 - i) for i in range(4)]),
    mesh=mesh, in_specs=P("x"), out_specs=P("x")))

def say(name):
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    print(name, len(_session.required().engine.peer_stats()), threads, files, flush=True)

sums = [total(x)]
jax.block_until_ready(sums)
say("rails")
sums += [total(x) for _ in range(50)]
turned = swapped(x)
for value in sums:
    np.testing.assert_array_equal(np.asarray(value.addressable_data(0)), data.sum(0))
for shard in turned.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), data[::-1][shard.index])
say("others")
"""


@pytest.mark.parametrize("transport", ["socket", "cuda_ipc"])
@pytest.mark.parametrize("islands", [2, (2, 2)], ids=["one process", "two processes"])
def test_permute_between_other_places_opens_channels(
    islands: int | tuple[int, int], transport: str
) -> None:
    require_gpus("cuda", 4)
    env = {"JAX_PLATFORMS": "", "JAXHET_TRANSPORTS": transport}
    job = WatchedJob(
        ["-c", SET_UP + _SCRIPT], islands=islands, devices=2 if islands == 2 else 1, env=env
    )
    job.wait(180)
    found = [line.text.split() for line in job.lines if line.text.startswith(("rails", "others"))]
    ends = {name: int(number) for name, number, *_ in found}
    assert set(ends) == {"rails", "others"}, job.text()
    assert (ends["others"] > ends["rails"]) == (transport == "socket"), job.text()
