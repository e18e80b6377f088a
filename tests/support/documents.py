"""The files of the project, and the fenced blocks of its documents."""

import re
import subprocess

from tests.support.jobs import ROOT

# Words after the fence, and the text.
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def tracked(*patterns: str) -> list[str]:
    """Names of the files that git tracks or would track."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "--"]
    names = subprocess.run(
        [*command, *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]
