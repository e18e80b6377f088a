"""Applications of JAX from the package index, in environments of their own, with this jaxhet."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib

from tests.support.jobs import ROOT

_UV = [sys.executable, "-m", "uv", "--quiet", "--no-config"]


def environment(name: str, *requirements: str) -> str:
    """The Python of `.cache/programs/apps-NAME`, which is made anew if its requirements changed.

    Raises:
      subprocess.CalledProcessError: The package index does not have the packages.
    """
    folder = ROOT / ".cache" / "programs" / f"apps-{name}"
    python = str(folder / "bin" / "python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    options = ["--constraint", str(ROOT / "constraints.txt")]
    arguments = [*options, *project["dependencies"], *requirements]
    stamp = folder / "requirements.txt"
    wanted = "\n".join([*requirements, (ROOT / "constraints.txt").read_text()])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([*_UV, "venv", "--clear", "--python", sys.executable, folder], check=True)
        subprocess.run([*_UV, "pip", "install", "--python", python, *arguments], check=True)
        stamp.write_text(wanted)
    _link_jaxhet(folder)
    return python


def _link_jaxhet(folder: pathlib.Path) -> None:
    """Installs the editable jaxhet of this environment in another one, without a build."""
    version = f"python{sysconfig.get_python_version()}"
    target = folder / "lib" / version / "site-packages"
    for file in importlib.metadata.files("jaxhet") or ():
        if file.parts[0] != "..":
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), path)
