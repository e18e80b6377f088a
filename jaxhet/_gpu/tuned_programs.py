"""Programs whose kernels an earlier job has tuned: a record beside the folder of XLA's results."""

import json
import os
import pathlib
import re
import zlib
from collections.abc import Mapping

# A path below the folder: XLA has a folder in it for each version of its results.
_FILE = re.compile(r"(\w[\w.\-]{0,254}/){0,3}\w[\w.\-]{0,254}")


def is_file_name(name: str) -> bool:
    """Whether `name` can be that of a result, below a process's folder and nowhere else."""
    return _FILE.fullmatch(name) is not None


def checksums(folder: pathlib.Path) -> dict[str, int]:
    """The CRC-32 of each result in a folder, by its path below the folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        name: zlib.crc32(path.read_bytes())
        for path in paths
        if is_file_name(name := path.relative_to(folder).as_posix())
    }


def has_all(folder: pathlib.Path, expected: Mapping[str, int]) -> bool:
    """Whether a folder holds results with these checksums; more may be there."""
    found = checksums(folder)
    return all(found.get(name) == checksum for name, checksum in expected.items())


class TunedPrograms:
    """The record of one process.

    For a recorded program the folder has all results that XLA needs. The same class of processes
    tuned the same module in an earlier job, and no result was lost or changed since then.
    """

    def __init__(self, path: pathlib.Path | None, folder: pathlib.Path, key: str):
        """Reads the record; one that is damaged or of another class counts as empty.

        Args:
          path: The file of the record; None to keep nothing.
          folder: The folder of XLA's results.
          key: The tuning class: devices, versions and flags.
        """
        self._path = path
        self._folder = folder
        self._key = key
        self._programs: dict[str, str] = {}
        self._files: dict[str, int] = {}
        if path is None or not path.exists():
            return
        try:
            record = json.loads(path.read_text())
            programs, files = dict(record["programs"]), dict(record["files"])
            is_valid = record["key"] == key and has_all(folder, files)
        except (OSError, ValueError, KeyError, TypeError):
            return
        if is_valid:
            self._programs, self._files = programs, files

    def files_of(self, program: str, module: str) -> dict[str, int] | None:
        """The results that XLA finds for a program, with checksums; None if it has to tune.

        Args:
          program: Digest of the program.
          module: Digest of the module that jaxhet hands to XLA.
        """
        return dict(self._files) if self._programs.get(program) == module else None

    def add(self, program: str, module: str) -> None:
        """Records that the folder now holds all results for a program."""
        self._programs[program] = module
        self._files = checksums(self._folder)
        if self._path is None:
            return
        record = {"key": self._key, "programs": self._programs, "files": self._files}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        os.replace(partial, self._path)
