"""Which transport the job has taken to each peer, and why not another one."""

import dataclasses

from jaxhet import _session


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A transport that a pair can't use.

    Attributes:
      transport: Name of the transport.
      reason: Message of the engine.
    """

    transport: str
    reason: str


@dataclasses.dataclass(frozen=True)
class PeerPath:
    """The path between this process and another one, for host memory.

    Attributes:
      process: JAX index of the other process.
      transport: Name of the transport; "" for a peer that no program has needed yet.
      refused: Transports that the pair can't use.
    """

    process: int
    transport: str
    refused: tuple[Refusal, ...]


def paths() -> tuple[PeerPath, ...]:
    """The paths to all other processes; none in a job of one island.

    Raises:
      UsageError: `jaxhet.initialize` was not called.

    Examples:
      >>> for path in jaxhet.paths():
      ...     print(path.process, path.transport, [r.reason for r in path.refused])
    """
    session = _session.required()
    if session.engine is None:
        return ()
    connector = session.compilation.connector
    found = []
    for process in sorted(p for island in session.islands for p in island.processes):
        if process != session.process:
            is_there = connector is None or connector.has(process)
            transport, refused = session.engine.path_to(process) if is_there else ("", [])
            found.append(PeerPath(process, transport, tuple(Refusal(*pair) for pair in refused)))
    return tuple(found)
