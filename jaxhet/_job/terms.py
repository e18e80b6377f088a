"""Size and islands that a coordinator requires, and the ids that it gives to processes."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._job.place import UNASSIGNED

if TYPE_CHECKING:
    from jaxhet._job.process_info import ProcessInfo


@dataclasses.dataclass(frozen=True)
class Terms:
    """Size and islands that a coordinator requires of a job.

    Attributes:
      num_processes: Size of the job.
      timeout_s: Longest wait for all processes, from the first one on.
      sizes: Processes of each island, in the order of process ids; empty: not announced.
      advertise: Host under which processes reach this one; None: the address to which each process
        has connected.
    """

    num_processes: int
    timeout_s: float
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    advertise: str | None = None

    def place(self, info: "ProcessInfo") -> "ProcessInfo":
        """`info`, completed by the coordinator's values. Pure.

        Raises:
          UsageError: The sizes of the islands do not determine the process id.
        """
        num_processes, process = info.num_processes, info.process
        islands = info.islands or tuple(filter(None, announced.text(self.sizes).split(",")))
        if num_processes == UNASSIGNED:
            num_processes = self.num_processes
        if process == UNASSIGNED:
            if not self.sizes or info.island_process is None:
                raise UsageError(
                    f"{info} has no process_id, and the coordinator does not know how many"
                    " processes the islands have: start `jaxhet coordinator` with --islands"
                    " NAME=PROCESSES,…, or set JAXHET_PROCESS_ID"
                )
            process = announced.process_id(self.sizes, info.island, info.island_process)
        return dataclasses.replace(
            info, process=process, num_processes=num_processes, islands=islands
        )

    def disagreement(self, info: "ProcessInfo") -> str | None:
        """Says why a process does not belong to this job, or None. Pure."""
        if info.num_processes != self.num_processes:
            return (
                f"num_processes differs: {info} has {info.num_processes}, the coordinator"
                f" {self.num_processes}; start every process of the job with the same value"
            )
        theirs = announced.sizes(info.islands)
        if self.sizes and theirs and theirs != self.sizes:
            return (
                f"the islands differ: {info} announces {announced.text(theirs)}, the coordinator"
                f" {announced.text(self.sizes)}; give both the same sizes, or only one of them"
            )
        return None
