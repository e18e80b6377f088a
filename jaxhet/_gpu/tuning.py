"""Kernels that XLA tunes: processes with equal devices run those that the first of them has chosen.

XLA measures candidates for products and convolutions when it compiles, and two measurements may
end in two choices: sums that should be equal on all replicas then differ in their last bits. So the
first process of a *tuning class* (equal devices, versions and flags) that takes part in a program
tunes, and the others load its results. XLA keeps a file for each kernel in a folder; each process
has a folder of its own, and the files travel through the job's coordinator.

In a second run with JAX's persistent cache the first process finds that nothing is left to tune,
says so when its compilation begins, and processes that have the same files do not wait.
"""

import base64
import os
import pathlib
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxhet._gpu.tuned_programs import TunedPrograms, checksums, has_all, is_file_name
from jaxhet._log import LOGGER

CACHE_FLAG = "xla_gpu_per_fusion_autotune_cache_dir"
# Flags by which users control tuning themselves.
OWN_FLAGS = (CACHE_FLAG, "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from")
LEVEL_FLAG = "xla_gpu_autotune_level"

_MOST_BYTES = 1 << 20  # largest size of the files in one message


def is_shared(flags: Mapping[str, str]) -> bool:
    """Whether processes share what they tune, by the user's flags of XLA."""
    return flags.get(LEVEL_FLAG) != "0" and not any(name in flags for name in OWN_FLAGS)


def folder(process: int, cache_folder: str | None) -> pathlib.Path:
    """The folder that XLA keeps this process's results in; made, and empty without a cache.

    Args:
      process: This process.
      cache_folder: JAX's persistent compilation cache; beside it results live longer than the job.
    """
    if cache_folder and "://" not in cache_folder:
        path = pathlib.Path(cache_folder) / "jaxhet_autotune" / f"process{process}"
        path.mkdir(parents=True, exist_ok=True)
        return path
    return pathlib.Path(tempfile.mkdtemp(prefix="jaxhet-autotune-"))


class Tuning:
    """Messages to and from the other processes of this process's tuning class.

    The compiler's hooks call `before` and `after`, on the thread that compiles.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        members: Sequence[int],
        process: int,
        tell: Callable[[dict[str, Any]], None],
        timeout_s: float,
        *,
        key: str = "",
    ):
        """Makes it for a class of processes.

        Args:
          folder: Where XLA reads and writes results.
          members: The processes of the class.
          process: This process.
          tell: Sends a message to the processes that it names.
          timeout_s: Longest wait for the first process, for each program.
          key: Identity of the class, for results that are kept.
        """
        self._folder = folder
        self._members = frozenset(members)
        self._process = process
        self._others = sorted(self._members - {process})
        self._tell = tell
        self._timeout_s = timeout_s
        self._is_temporary = folder.parent == pathlib.Path(tempfile.gettempdir())
        record = None if self._is_temporary else folder.with_name(f"{folder.name}.json")
        self._record = TunedPrograms(record, folder, key)
        self._changed = threading.Condition()
        self._tuned: set[str] = set()  # programs whose results are here
        self._led: dict[str, str] = {}  # programs that this process tunes for others; their modules
        # By program that needs no tuning: checksums of the folder's files before it is compiled.
        self._results: dict[str, dict[str, int]] = {}
        self._sent: dict[str, float] = {}  # files that the others have, by their time

    def before(
        self, program: str, module: str, processes: Collection[int], is_over: Callable[[], bool]
    ) -> None:
        """Before XLA tunes a program: waits for the results of the first process.

        Args:
          program: Digest of the program.
          module: Digest of the module that XLA is going to tune.
          processes: The processes whose devices run the program.
          is_over: Whether to wait no more, since the job has failed.
        """
        taking_part = self._members.intersection(processes)
        if len(taking_part) < 2:
            return
        first = min(taking_part)
        if first == self._process:
            self._led[program] = module
            if (files := self._record.files_of(program, module)) is not None:
                self._results[program] = checksums(self._folder)
                self._tell({"to": self._others, "program": program, "known": files})
            return
        waited = 0.0
        with self._changed:
            while program not in self._tuned and not is_over():
                if waited >= self._timeout_s:
                    LOGGER.warning(
                        "process %d has not tuned a program within %g s; this process tunes its own"
                        " kernels for it, and replicas may differ in their last bits"
                        " (JAXHET_TUNING_TIMEOUT_S)",
                        first,
                        self._timeout_s,
                    )
                    self._tuned.add(program)
                    return
                self._changed.wait(0.2)
                waited += 0.2

    def after(self, program: str) -> None:
        """After XLA has tuned a program: the first process sends what the others lack."""
        if program not in self._led or program in self._tuned:
            return
        self._tuned.add(program)
        self._record.add(program, self._led[program])
        before = self._results.get(program)
        if before is not None and before != checksums(self._folder):
            LOGGER.warning(
                "XLA has tuned kernels of a program again, though their results are in %s; replicas"
                " may differ in their last bits in this run (remove the folder)",
                self._folder,
            )
        files: dict[str, str] = {}
        for path in sorted(self._folder.rglob("*")):
            name, time = path.relative_to(self._folder).as_posix(), path.stat().st_mtime
            if not path.is_file() or self._sent.get(name) == time:
                continue
            self._sent[name] = time
            files[name] = base64.b64encode(zlib.compress(path.read_bytes())).decode()
            if sum(map(len, files.values())) > _MOST_BYTES:
                self._send("", files)
                files = {}
        self._send(program, files)

    def _send(self, program: str, files: dict[str, str]) -> None:
        self._tell({"to": self._others, "program": program, "files": files})

    def hear(self, message: Mapping[str, Any]) -> None:
        """Takes a message of a first process: files, or checksums of those that are known."""
        if "known" in message:
            if not has_all(self._folder, message["known"]):
                return  # the files follow when that process has compiled
        else:
            self._write(message["files"])
        with self._changed:
            self._tuned.add(message["program"])
            self._changed.notify_all()

    def _write(self, files: Mapping[str, str]) -> None:
        for name, content in files.items():
            if not is_file_name(name):
                continue
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(zlib.decompress(base64.b64decode(content)))
            os.replace(partial, path)

    def close(self) -> None:
        """Removes a folder that was made for this job."""
        if self._is_temporary:
            shutil.rmtree(self._folder, ignore_errors=True)
