"""The transport that the job uses to each peer, and why not a better one."""

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
    """The path of data between this process and another one.

    Attributes:
      process: JAX index of the other process.
      transport: Name of the transport; on GPUs, of the device channels. If they differ, all
        names with "+" between them. "" for a peer that no program has needed yet.
      refused: Transports that the pair of processes can't use; on GPUs, those that a pair of their
        devices can't use.
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
    connector = session.compilation.parts.connector
    names: dict[int, set[str]] = {}
    for peer in session.engine.peer_stats():
        names.setdefault(peer["process"], set()).add(peer["transport"])
    found = []
    for process in sorted(p for island in session.islands for p in island.processes):
        if process != session.process:
            transport = "+".join(sorted(names.get(process, ())))
            is_there = connector is None or connector.has(process)
            refused = session.engine.transport_of(process)[1] if is_there else []
            found.append(PeerPath(process, transport, tuple(Refusal(*pair) for pair in refused)))
    return tuple(found)
