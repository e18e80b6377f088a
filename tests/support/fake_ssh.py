"""An `ssh` that runs the command on this machine, in the poor environment of a login by network."""

import dataclasses
import json
import os
import pathlib
import sys

from tests.support.jobs import PYTHONPATH

_PROGRAM = """#!{python}
import json, os, pathlib, subprocess, sys

folder = pathlib.Path({folder!r})
*options, dashes, host, command = sys.argv[1:]
assert dashes == "--"
seen = {{"argv": sys.argv, "environ": dict(os.environ), "host": host}}
(folder / f"{{os.getpid()}}.json").write_text(json.dumps(seen))
failure = folder / f"{{host}}.failure"
if failure.exists():
    print(failure.read_text(), file=sys.stderr)
    sys.exit(255)
env = {{"PATH": os.defpath, "PYTHONPATH": {pythonpath!r}, "THIS_HOST": host}}
print("a greeting of", host, flush=True)
process = subprocess.Popen(["sh", "-c", command], cwd=folder, env=env, start_new_session=True)
code = process.wait()
sys.exit(code if code >= 0 else 255)
"""


@dataclasses.dataclass(frozen=True)
class FakeSsh:
    """A folder with the program, for the first place in PATH."""

    folder: pathlib.Path

    @classmethod
    def make(cls, folder: pathlib.Path) -> "FakeSsh":
        """Writes the program into a new folder."""
        folder.mkdir()
        program = folder / "ssh"
        text = _PROGRAM.format(python=sys.executable, folder=str(folder), pythonpath=PYTHONPATH)
        program.write_text(text)
        program.chmod(0o755)
        return cls(folder)

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment, with the fake as `ssh`."""
        return {**os.environ, "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    def fail(self, host: str, words: str) -> None:
        """Makes the next logins at a host fail."""
        (self.folder / f"{host}.failure").write_text(words)

    def calls(self) -> list[dict[str, object]]:
        """Record of each call: `argv`, `environ`, `host`."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
