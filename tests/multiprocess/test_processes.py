"""Sockets that processes hold, counted in jobs of eight."""

import pytest

from benchmarks import processes

pytestmark = pytest.mark.slow  # JAX starts in 16 processes


def test_processes_of_a_large_job_connect_to_their_rails() -> None:
    rails = processes.measure("jaxhet, socket, rails", 18, 240)
    # The coordinator; JAX's client, its relay's two ends; a peer's control and data.
    assert rails.sockets == 1 + 3 + 1 + 2


def test_data_sockets_are_kept_only_where_tcp_carries_data() -> None:
    shared = processes.measure("jaxhet", 8, 120)
    tcp = processes.measure("jaxhet, socket", 8, 120)
    assert tcp.sockets - shared.sockets == 2 * 7  # data for each of the other processes
    assert tcp.threads == shared.threads
