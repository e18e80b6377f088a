"""`jaxhet launch --hosts`: two hosts train; an ssh that runs the commands here stands for both."""

import pathlib
import subprocess
import sys

from tests.support.fake_ssh import FakeSsh
from tests.support.jobs import ROOT

_PROGRAM = """
import jax, jax.numpy as jnp, jaxhet, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jaxhet.initialize()
mesh = jaxhet.make_mesh({"data": -1})
rows = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
x = jax.make_array_from_callback((8, 3), NamedSharding(mesh, P("data")), lambda i: rows[i])

@jaxhet.jit
def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, 0]) ** 2))(w)
    return w - 0.3 * gradient, loss

w = jnp.zeros(3)
for _ in range(20):
    w, loss = step(w, x)
addresses = {path.transport for path in jaxhet.paths()}
print("loss", float(loss), len(jaxhet.islands()), jax.device_count(), sorted(addresses))
jaxhet.shutdown()
"""
_CLUSTER = """
coordinator: 127.0.0.1
env: {JAXHET_TRANSPORTS: tcp}
hosts:
  - {island: a, host: h0, directory: DIRECTORY, python: PYTHON, devices: 2,
     env: {JAXHET_TCP_ADDRESS: 127.0.0.2}}
  - {island: b, host: h1, directory: DIRECTORY, python: PYTHON, devices: 2,
     env: {JAXHET_TCP_ADDRESS: 127.0.0.3}}
"""


def _expected() -> float:
    """The loss of the same steps, in NumPy."""
    import numpy as np

    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    w, loss = np.zeros(3), 0.0
    for _ in range(20):
        error = x @ w - x[:, 0]
        loss = float(np.mean(error**2))
        w = w - 0.3 * 2 * (x.T @ error) / len(x)
    return loss


def test_two_hosts_train_as_one_program(tmp_path: pathlib.Path):
    ssh = FakeSsh.make(tmp_path / "ssh")
    (tmp_path / "train.py").write_text(_PROGRAM)
    cluster = tmp_path / "cluster.yaml"
    text = _CLUSTER.replace("DIRECTORY", str(tmp_path)).replace("PYTHON", sys.executable)
    cluster.write_text(text)
    command = [sys.executable, "-m", "jaxhet.cli", "launch", "--hosts", str(cluster)]
    ended = subprocess.run(
        [*command, "--", "python", "train.py"],
        check=False,
        cwd=ROOT,
        env=ssh.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if "loss" in line)
    assert [line.split()[0] for line in lines] == ["[a/0]", "[b/1]"]
    for line in lines:
        _, _, loss, *rest = line.split(maxsplit=3)
        assert abs(float(loss) - _expected()) < 1e-6
        assert rest == ["2 4 ['tcp']"]
