"""Dockerfiles in deploy/images/: one version of jaxlib in all, and install lines that work."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.jobs import ROOT

_IMAGES = ROOT / "deploy" / "images"
_NAMES = ("cuda", "rocm", "coordinator")
_PLUGINS = {
    "cuda": {"jax-cuda13-plugin", "jax-cuda13-pjrt"},
    "rocm": {"jax-rocm7-plugin", "jax-rocm7-pjrt"},
    "coordinator": set(),
}


def _lines(name: str) -> list[str]:
    """The commands of pip in a Dockerfile."""
    text = (_IMAGES / f"{name}.Dockerfile").read_text()
    return re.findall(r"^RUN (pip .*)$", text, re.MULTILINE)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_images_build_and_install_the_same_wheel_with_the_same_pins() -> None:
    wheels, installs = zip(*map(_lines, _NAMES), strict=True)
    assert set(wheels) == {
        "pip wheel --no-deps -c /src/constraints.txt -C cmake.define.JAXHET_UNITY=ON"
        " -w /wheels /src"
    }
    for line in installs:
        assert line.startswith("pip install --no-cache-dir -c /constraints.txt /wheels/*.whl")


@pytest.mark.parametrize("name", _NAMES)
def test_plugins_of_an_image_have_the_version_of_jaxlib(name: str) -> None:
    """The wheel of jaxhet requires jax, and jax its own version of jaxlib."""
    pins = _pins()
    assert pins["jaxlib"] == pins["jax"]
    extra = re.findall(r'"jax\[(\w+)\]"', _lines(name)[1])
    wanted = set(re.findall(r"\b(jax-\w+-\w+)", _lines(name)[1]))
    for requirement in importlib.metadata.requires("jax") or ():
        if any(f'extra == "{e}"' in requirement for e in extra):
            found = re.match(r"jax-\w+-\w+", requirement)
            wanted |= {found[0]} if found else set()
    if "jax-cuda13-plugin" in wanted:
        wanted.add("jax-cuda13-pjrt")  # a requirement of the plugin
    assert wanted == _PLUGINS[name]
    assert {pins[plugin] for plugin in wanted} <= {pins["jaxlib"]}


def test_wheel_is_built_with_the_headers_of_the_oldest_jaxlib() -> None:
    """Constraints of `pip wheel -c` do not reach the environment in which pip builds."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (built_with,) = [r for r in table["build-system"]["requires"] if r.startswith("jaxlib")]
    assert built_with == f"jaxlib=={_pins()['jaxlib']}"
    assert f"jax>={_pins()['jaxlib']},<0.13" in table["project"]["dependencies"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_install_lines_of_the_coordinator_work_in_a_fresh_environment(
    tmp_path: pathlib.Path,
) -> None:
    """The other two images have the same lines, and the plugin of their vendor."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    for line in _lines("coordinator"):
        command = line.replace("/wheels", str(tmp_path / "wheels"))
        command = re.sub(r"(?<= )/(?=constraints)|/src/(?=constraints)", f"{ROOT}/", command)
        command = re.sub(r"/src$", str(ROOT), command)
        ended = subprocess.run(
            ["sh", "-c", command],
            env={
                "PATH": f"{tmp_path}/venv/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(tmp_path),
            },
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert _sum_over_islands(tmp_path) == ["28.0", "28.0"]


_SUM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
x = jax.make_array_from_callback((8,), sharding, np.arange(8, dtype=np.float32).__getitem__)
print(float(jax.jit(jnp.sum)(x)), flush=True)
jax.distributed.shutdown()
"""


def _sum_over_islands(folder: pathlib.Path) -> list[str]:
    """Output of each island of a job that only the fresh environment runs."""
    jaxhet = folder / "venv" / "bin" / "jaxhet"
    launch = [jaxhet, "launch", "--islands", "2", "--", jaxhet, "run", "--"]
    ended = subprocess.run(
        [*launch, folder / "venv" / "bin" / "python", "-c", _SUM],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return [line.split()[-1] for line in ended.stdout.splitlines()]
