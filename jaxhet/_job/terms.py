"""Size and islands that a coordinator requires, and the ids that it gives to processes."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxhet._errors import UsageError
from jaxhet._job import announced
from jaxhet._job.place import UNASSIGNED

if TYPE_CHECKING:
    from jaxhet._job.claim import Claim


@dataclasses.dataclass(frozen=True)
class Terms:
    """Size and islands that a coordinator requires of a job.

    Attributes:
      num_processes: Size of the job.
      timeout_s: Longest wait for all processes, from the first one on.
      sizes: Processes of each island, in the order of process ids; empty: not announced.
      advertise: Host under which processes reach this one; None: by which each has come.
    """

    num_processes: int
    timeout_s: float
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    advertise: str | None = None

    def place(self, claim: "Claim") -> "Claim":
        """The claim with what the process left to the coordinator. Pure.

        Raises:
          UsageError: The sizes of the islands do not say it.
        """
        num_processes, process = claim.num_processes, claim.process
        islands = claim.islands or tuple(filter(None, announced.text(self.sizes).split(",")))
        if num_processes == UNASSIGNED:
            num_processes = self.num_processes
        if process == UNASSIGNED:
            if not self.sizes or claim.island_process is None:
                raise UsageError(
                    f"{claim} has no process_id, and the coordinator does not know how many"
                    " processes the islands have: start `jaxhet coordinator` with --islands"
                    " NAME=PROCESSES,…, or set JAXHET_PROCESS_ID"
                )
            process = announced.process_id(self.sizes, claim.island, claim.island_process)
        return dataclasses.replace(
            claim, process=process, num_processes=num_processes, islands=islands
        )

    def disagreement(self, claim: "Claim") -> str | None:
        """Says why a process does not belong to this job, or None. Pure."""
        if claim.num_processes != self.num_processes:
            return (
                f"num_processes differs: {claim} has {claim.num_processes}, the coordinator"
                f" {self.num_processes}; start every process of the job with the same value"
            )
        theirs = announced.sizes(claim.islands)
        if self.sizes and theirs and theirs != self.sizes:
            return (
                f"the islands differ: {claim} announces {announced.text(theirs)}, the coordinator"
                f" {announced.text(self.sizes)}; give both the same sizes, or only one of them"
            )
        return None
